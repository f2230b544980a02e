//! What the code that nvcc generates calls: it registers binaries, kernels and variables, and launches.

use crate::abi::{Dim3, INVALID_VALUE, LaunchConfig, SUCCESS, Status, ptx_of, put, string};
use crate::runtime::{call, with};
use dualgemm_device::{Device, LaunchSpec};
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_void};

thread_local! {
    /// What `<<<...>>>` pushes for the stub that follows.
    static PUSHED: RefCell<Vec<(Dim3, Dim3, usize)>> = const { RefCell::new(Vec::new()) };
}

exports! {
    fn __cudaRegisterFatBinary(wrapper: *const c_void) -> *mut *mut c_void {
        // `struct { int magic, version; const void* data; void* other; }`
        let data = *wrapper.cast::<*const u8>().add(1);
        let ptx = ptx_of(data).unwrap_or_default();
        with(|r| r.binaries.push((ptx, None)));
        // The handle is the number of the binary, never followed.
        with(|r| r.binaries.len()) as *mut *mut c_void
    }
    fn __cudaRegisterFunction(
        handle: *mut *mut c_void,
        stub: *const c_void,
        _device: *mut c_char,
        name: *const c_char,
    ) -> c_int {
        let name = string(name);
        with(|r| r.kernels.insert(stub as usize, (handle as usize - 1, name)));
        SUCCESS
    }
    fn __cudaRegisterVar(
        handle: *mut *mut c_void,
        host: *const c_void,
        _device: *mut c_char,
        name: *const c_char,
    ) -> () {
        let name = string(name);
        with(|r| r.variables.insert(host as usize, (handle as usize - 1, name)));
    }
    fn __cudaPopCallConfiguration(
        grid: *mut Dim3,
        block: *mut Dim3,
        shared: *mut usize,
        stream: *mut *mut c_void,
    ) -> Status {
        let Some((g, b, s)) = PUSHED.with_borrow_mut(Vec::pop) else { return INVALID_VALUE };
        put(grid, g);
        put(block, b);
        put(shared, s);
        put(stream, std::ptr::null_mut());
        SUCCESS
    }
    fn __cudaGetKernel(kernel: *mut *const c_void, stub: *const c_void) -> Status {
        put(kernel, stub);
        SUCCESS
    }
    fn __cudaLaunchKernel(
        kernel: *const c_void,
        grid: Dim3,
        block: Dim3,
        args: *const *const c_void,
        shared: usize,
        stream: *mut c_void,
    ) -> Status {
        cudaLaunchKernel(kernel, grid, block, args, shared, stream)
    }
    fn cudaLaunchKernel(
        stub: *const c_void,
        grid: Dim3,
        block: Dim3,
        args: *const *const c_void,
        shared: usize,
        _stream: *mut c_void,
    ) -> Status {
        let spec = |f| LaunchSpec::new(f, grid.0, block.0).dynamic_shared(shared as u32);
        call(|r| r.launch(stub, spec, args))
    }
    fn cudaLaunchKernelExC(config: *const LaunchConfig, stub: *const c_void, args: *const *const c_void) -> Status {
        let config = &*config;
        let (grid, block, shared) = (config.grid.0, config.block.0, config.shared as u32);
        let spec = |f| LaunchSpec::new(f, grid, block).cluster(config.cluster()).dynamic_shared(shared);
        call(|r| r.launch(stub, spec, args))
    }
    fn cudaFuncGetAttributes(attributes: *mut [u32; 36], stub: *const c_void) -> Status {
        call(|r| {
            let kernel = r.kernel(stub)?;
            let info = r.gpu().info();
            let mut words = [0; 36];
            words[0] = kernel.dynamic_offset;
            // Threads of a CTA, registers, PTX and binary version, dynamic shared memory.
            words[6] = kernel.maxntid.map_or(1024, |n| n.iter().product());
            words[7] = kernel.maxnreg.unwrap_or(128);
            words[8..10].fill(10 * info.arch.major + info.arch.minor);
            words[11] = info.shared_per_cta - kernel.dynamic_offset;
            put(attributes, words);
            Ok(())
        })
    }
    fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: *mut c_int,
        stub: *const c_void,
        _threads: c_int,
        shared: usize,
        _flags: c_uint,
    ) -> Status {
        call(|r| {
            let bytes = (u64::from(r.kernel(stub)?.dynamic_offset) + shared as u64).max(1);
            put(blocks, (u64::from(r.gpu().info().shared_per_sm) / bytes).min(8) as c_int);
            Ok(())
        })
    }
    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        stub: *const c_void,
        threads: c_int,
        shared: usize,
    ) -> Status {
        cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, stub, threads, shared, 0)
    }
    fn cudaOccupancyMaxActiveClusters(
        clusters: *mut c_int,
        _stub: *const c_void,
        config: *const LaunchConfig,
    ) -> Status {
        let size: u32 = (*config).cluster().iter().product();
        call(|r| {
            put(clusters, (r.gpu().info().sm_count / size.max(1)) as c_int);
            Ok(())
        })
    }
}

safe_exports! {
    fn __cudaInitModule(_handle: *mut *mut c_void) -> c_char {
        0
    }
    fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared: usize, _stream: *mut c_void) -> c_uint {
        PUSHED.with_borrow_mut(|p| p.push((grid, block, shared)));
        0
    }
    fn cudaFuncSetAttribute(stub: *const c_void, _attribute: c_int, _value: c_int) -> Status {
        call(|r| r.kernel(stub).map(drop))
    }
}

nothing! { __cudaRegisterFatBinaryEnd, __cudaUnregisterFatBinary, cudaFuncSetCacheConfig }
