//! The CUDA runtime on the simulator: programs that nvcc compiled run unmodified, kernels and all.
//!
//! ```sh
//! cargo build --release -p dualgemm-sim --example cudart
//! nvcc -gencode arch=compute_90a,code=compute_90a -no-compress -cudart none -c program.cu
//! g++ program.o -L target/release/examples -lcudart -Wl,-rpath,target/release/examples -o program
//! ./program
//! ```
//!
//! The calls that CUTLASS, Thrust and CUDA's samples make are here: memory, launches with clusters, tensor maps,
//! device properties. Streams and events exist; everything is done at once. The PTX must be in the program
//! uncompressed. `SIM_SEED=7` chooses the interleaving, `SIM_CHECKS` the checks (`all`, `none`, or a list
//! of those to leave out: `race,uninit,exit`), `SIM_TRACE=1` prints each launch, `SIM_RECORD=DIR` writes module
//! and launch to files.
//!
//! Calls: CUDA Runtime API, <https://docs.nvidia.com/cuda/cuda-runtime-api/>. Signatures are C's.

use dualgemm_device::{Args, Device, DeviceInfo, DevicePtr, Error, FunctionId, LaunchSpec, ModuleId};
use dualgemm_ptx::layout::{Interleave, L2Promotion, OutOfBounds, TensorDataType, TensorMap, TensorSwizzle};
use dualgemm_sim::program::Kernel;
use dualgemm_sim::{Card, Checks, Config, Gpu};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a card answers.
type Answer = fn(&Gpu) -> u32;

/// `cudaError_t`
type Status = c_int;
const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 1;
const OUT_OF_MEMORY: Status = 2;
const INVALID_FUNCTION: Status = 98;
const LAUNCH_FAILURE: Status = 719;
/// `cudaDevAttr...` this library answers, others are 0.
const ATTRIBUTES: [(c_int, Answer); 11] = [
    (1, |_| 1024),
    (5, |_| i32::MAX as u32),
    (6, |_| 65535),
    (7, |_| 65535),
    (8, |_| 48 << 10),
    (10, |_| 32),
    (16, |g| g.info().sm_count),
    (39, |_| 2048),
    (75, |g| g.info().arch.major),
    (76, |g| g.info().arch.minor),
    (97, |g| g.info().shared_per_cta),
];

#[derive(Default)]
struct Runtime {
    /// PTX of each registered binary, and its module once loaded.
    binaries: Vec<(String, Option<ModuleId>)>,
    /// Host stub to binary and kernel name.
    kernels: HashMap<usize, (usize, String)>,
    /// Host variable to binary and name.
    variables: HashMap<usize, (usize, String)>,
    gpu: Option<Gpu>,
    last: Status,
    launches: usize,
}

/// `dim3`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Dim3([u32; 3]);

/// `cudaLaunchConfig_t`
#[repr(C)]
pub struct LaunchConfig {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: *mut c_void,
    attributes: *const Attribute,
    count: c_uint,
}

/// `cudaLaunchAttribute`
#[repr(C, align(8))]
pub struct Attribute {
    id: c_int,
    padding: c_int,
    value: [u32; 16],
}

impl LaunchConfig {
    /// # Safety
    /// The attributes are there.
    unsafe fn cluster(&self) -> [u32; 3] {
        // SAFETY: the caller's promise.
        let mut attributes = (0..self.count as usize).map(|i| unsafe { &*self.attributes.add(i) });
        // `cudaLaunchAttributeClusterDimension`
        let found = attributes.rfind(|a| a.id == 4);
        found.map_or([1; 3], |a| [a.value[0], a.value[1], a.value[2]])
    }
}

static RUNTIME: Mutex<Option<Runtime>> = Mutex::new(None);
thread_local! {
    /// What `<<<...>>>` pushes for the stub that follows.
    static PUSHED: RefCell<Vec<(Dim3, Dim3, usize)>> = const { RefCell::new(Vec::new()) };
}

struct Held(MutexGuard<'static, Option<Runtime>>);

impl Held {
    fn take() -> Held {
        Held(RUNTIME.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn runtime(&mut self) -> &mut Runtime {
        self.0.get_or_insert_default()
    }
}

fn with<T>(f: impl FnOnce(&mut Runtime) -> T) -> T {
    f(Held::take().runtime())
}

/// Runs a call and remembers its status.
fn call(f: impl FnOnce(&mut Runtime) -> Result<(), Status>) -> Status {
    with(|r| match f(r) {
        Ok(()) => SUCCESS,
        Err(status) => {
            r.last = status;
            status
        }
    })
}

impl Runtime {
    /// The simulated card: the newest that a registered binary is for.
    fn gpu(&mut self) -> &Gpu {
        let binaries = &self.binaries;
        self.gpu.get_or_insert_with(|| {
            let targets = binaries.iter().filter_map(|(ptx, _)| target(ptx));
            let card = match targets.max() {
                Some(100..=109) => Card::B200,
                Some(120..) => Card::RtxPro6000,
                _ => Card::H100,
            };
            let named = std::env::var("SIM_CHECKS").unwrap_or_default();
            let mut checks = match named.as_str() {
                "all" => Checks::ALL,
                "none" => Checks::NONE,
                _ => Checks::DEFAULT,
            };
            for (name, check) in
                [("race", &mut checks.race), ("uninit", &mut checks.uninit), ("exit", &mut checks.exit)]
            {
                *check &= !named.split(',').any(|n| n == name);
            }
            let seed = std::env::var("SIM_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0);
            Gpu::new(Config::default().card(card).checks(checks).seed(seed))
        })
    }

    fn module(&mut self, binary: usize) -> Result<ModuleId, Status> {
        if let Some(module) = self.binaries[binary].1 {
            return Ok(module);
        }
        let ptx = self.binaries[binary].0.clone();
        if let Ok(dir) = std::env::var("SIM_RECORD") {
            write(&format!("{dir}/module{binary}.ptx"), ptx.as_bytes());
        }
        let module = self.gpu().load(&ptx).map_err(|e| complain(&e, INVALID_FUNCTION))?;
        self.binaries[binary].1 = Some(module);
        Ok(module)
    }

    fn function(&mut self, stub: *const c_void) -> Result<(usize, String, FunctionId), Status> {
        let (binary, name) = self.kernels.get(&(stub as usize)).cloned().ok_or(INVALID_FUNCTION)?;
        let module = self.module(binary)?;
        let function = self.gpu().function(module, &name).map_err(|e| complain(&e, INVALID_FUNCTION))?;
        Ok((binary, name, function))
    }

    fn kernel(&mut self, stub: *const c_void) -> Result<Arc<Kernel>, Status> {
        let (_, _, function) = self.function(stub)?;
        self.gpu().kernel(function).map_err(|e| complain(&e, INVALID_FUNCTION))
    }

    fn variable(&mut self, host: *const c_void) -> Result<DevicePtr, Status> {
        let (binary, name) = self.variables.get(&(host as usize)).cloned().ok_or(INVALID_VALUE)?;
        let module = self.module(binary)?;
        let found = self.gpu().symbol(module, &name);
        found.map(|(at, _)| at).map_err(|e| complain(&e, INVALID_VALUE))
    }

    /// # Safety
    /// `args` has a pointer to each parameter of the kernel.
    unsafe fn launch(
        &mut self,
        stub: *const c_void,
        spec: impl FnOnce(FunctionId) -> LaunchSpec,
        args: *const *const c_void,
    ) -> Result<(), Status> {
        let (binary, name, function) = self.function(stub)?;
        let kernel = self.kernel(stub)?;
        let mut list = Args::new();
        for (i, p) in kernel.params.iter().enumerate() {
            // SAFETY: the caller passes one pointer per parameter, to a value of the parameter's size.
            let bytes = unsafe { std::slice::from_raw_parts((*args.add(i)).cast::<u8>(), p.bytes as usize) };
            list = list.bytes(bytes, 1);
        }
        let spec = spec(function).args(list);
        let number = self.launches;
        self.launches += 1;
        if std::env::var_os("SIM_TRACE").is_some() {
            let (g, b, c) = (spec.grid, spec.block, spec.cluster);
            let name: String = name.chars().take(60).collect();
            eprintln!(
                "launch {number}: {name} grid {g:?} block {b:?} cluster {c:?} shared {}",
                spec.dynamic_shared
            );
        }
        if let Ok(dir) = std::env::var("SIM_RECORD") {
            let mut text = format!(
                "module{binary}.ptx {name}\ngrid {:?}\nblock {:?}\ncluster {:?}\nshared {}\n",
                spec.grid, spec.block, spec.cluster, spec.dynamic_shared
            );
            for arg in spec.args.iter() {
                text.push_str("arg ");
                text.extend(arg.bytes().iter().map(|b| format!("{b:02x}")));
                text.push('\n');
            }
            write(&format!("{dir}/launch{number}.txt"), text.as_bytes());
        }
        let start = std::time::Instant::now();
        let result = self.gpu().launch(&spec);
        if let Some(outcome) = self.gpu().take_outcome() {
            print!("{}", outcome.output);
        }
        if std::env::var_os("SIM_TRACE").is_some() {
            eprintln!("launch {number}: {:.2?}", start.elapsed());
        }
        result.map_err(|e| complain(&e, LAUNCH_FAILURE))
    }
}

fn target(ptx: &str) -> Option<u32> {
    let line = ptx.lines().find_map(|l| l.strip_prefix(".target sm_"))?;
    line.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok()
}

fn complain(error: &dyn std::fmt::Display, status: Status) -> Status {
    eprintln!("{error}");
    status
}

fn write(path: &str, bytes: &[u8]) {
    if let Err(e) = std::fs::write(path, bytes) {
        eprintln!("{path}: {e}");
    }
}

/// The PTX of a fat binary (`fatbinary`'s format: a header, then entries with a header each).
///
/// # Safety
/// `data` is what nvcc put into the program.
unsafe fn ptx_of(data: *const u8) -> Option<String> {
    // SAFETY: the caller's data start with a header of 16 bytes, whose fields lead from entry to entry.
    let word = |at: usize, n: usize| unsafe {
        (0..n).fold(0u64, |v, i| v | u64::from(*data.add(at + i)) << (8 * i))
    };
    let (mut at, end) = (word(6, 2) as usize, word(8, 8) as usize + word(6, 2) as usize);
    while at < end {
        let (kind, header, bytes) = (word(at, 2), word(at + 4, 4) as usize, word(at + 8, 8) as usize);
        let compressed = word(at + 40, 8) & 0xa000 != 0;
        if kind == 1 && compressed {
            eprintln!("the program's PTX is compressed: compile with nvcc -no-compress");
        } else if kind == 1 {
            // SAFETY: the entry's payload lies behind its header.
            let text = unsafe { std::slice::from_raw_parts(data.add(at + header), bytes) };
            let text = text.split(|b| *b == 0).next().unwrap_or_default();
            return Some(String::from_utf8_lossy(text).into_owned());
        }
        at += header + bytes;
    }
    None
}

/// # Safety
/// `p` is a C string.
unsafe fn string(p: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
}

/// # Safety
/// `to` is writable, or null.
unsafe fn put<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: not null, and writable by the caller's promise.
        unsafe { to.write(value) }
    }
}

/// Whether an address is the device's. They lie where no program has its own, so that the direction that a copy
/// names need not be believed: simulated memory starts here, libraries and stacks of the process much higher.
fn on_device(p: *const u8) -> bool {
    (0x7000_0000_0000..0x7800_0000_0000).contains(&(p as u64))
}

/// `cudaDeviceProp`, by its offsets in CUDA 13.
fn properties_of(info: &DeviceInfo) -> [u8; 1008] {
    let mut bytes = [0; 1008];
    let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    set(0, &info.name.as_bytes()[..info.name.len().min(255)]);
    set(288, &info.memory_bytes.to_le_bytes());
    set(296, &(48u64 << 10).to_le_bytes());
    set(624, &u64::from(info.shared_per_sm).to_le_bytes());
    set(672, &u64::from(info.shared_per_cta).to_le_bytes());
    let words = [
        (304, info.registers_per_sm),
        (308, 32),
        (320, 1024),
        (324, 1024),
        (328, 1024),
        (332, 64),
        (336, i32::MAX as u32),
        (340, 65535),
        (344, 65535),
        (360, info.arch.major),
        (364, info.arch.minor),
        (384, info.sm_count),
        (588, 1),
        (596, info.l2_bytes as u32),
        (604, 2048),
        (632, info.registers_per_sm),
        (688, 32),
    ];
    words.into_iter().for_each(|(at, value)| set(at, &value.to_le_bytes()));
    bytes
}

/// Functions that follow pointers of the caller.
macro_rules! exports {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $out:ty $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the CUDA runtime, or what its headers call.")]
        ///
        /// # Safety
        /// Pointers are valid as the CUDA Runtime API requires of this call.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> $out {
            // SAFETY: the caller keeps the rules of the CUDA Runtime API.
            unsafe { $body }
        }
    )*};
}

/// Functions that follow none.
macro_rules! safe_exports {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $out:ty $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the CUDA runtime, or what its headers call.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> $out $body
    )*};
}

/// Calls that succeed and do nothing: streams and events exist, everything is done at once.
macro_rules! nothing {
    ($($name:ident),* $(,)?) => {
        safe_exports! { $(fn $name() -> Status { SUCCESS })* }
    };
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

    fn cudaMalloc(to: *mut u64, bytes: usize) -> Status {
        call(|r| {
            let at = r.gpu().alloc(bytes.max(1)).map_err(|e| complain(&e, OUT_OF_MEMORY))?;
            put(to, at.0);
            Ok(())
        })
    }
    fn cudaMallocAsync(to: *mut u64, bytes: usize, _stream: *mut c_void) -> Status {
        cudaMalloc(to, bytes)
    }
    fn cudaMemcpy(to: *mut u8, from: *const u8, bytes: usize, _kind: c_int) -> Status {
        let refused = |e: Error| complain(&e, INVALID_VALUE);
        call(|r| {
            let mut buffer = Vec::new();
            let source = if on_device(from) {
                buffer.resize(bytes, 0);
                r.gpu().copy_from(&mut buffer, DevicePtr(from as u64)).map_err(refused)?;
                buffer.as_slice()
            } else {
                std::slice::from_raw_parts(from, bytes)
            };
            if on_device(to) {
                return r.gpu().copy_to(DevicePtr(to as u64), source).map_err(refused);
            }
            std::ptr::copy(source.as_ptr(), to, bytes);
            Ok(())
        })
    }
    fn cudaMemcpyAsync(to: *mut u8, from: *const u8, bytes: usize, kind: c_int, _stream: *mut c_void) -> Status {
        cudaMemcpy(to, from, bytes, kind)
    }
    fn cudaMemcpyToSymbol(
        symbol: *const c_void,
        from: *const u8,
        bytes: usize,
        offset: usize,
        kind: c_int,
    ) -> Status {
        match with(|r| r.variable(symbol)) {
            Ok(at) => cudaMemcpy((at.0 + offset as u64) as *mut u8, from, bytes, kind),
            Err(status) => status,
        }
    }
    fn cudaMemcpyFromSymbol(
        to: *mut u8,
        symbol: *const c_void,
        bytes: usize,
        offset: usize,
        kind: c_int,
    ) -> Status {
        match with(|r| r.variable(symbol)) {
            Ok(at) => cudaMemcpy(to, (at.0 + offset as u64) as *const u8, bytes, kind),
            Err(status) => status,
        }
    }
    fn cudaGetSymbolAddress(to: *mut u64, symbol: *const c_void) -> Status {
        call(|r| r.variable(symbol).map(|at| put(to, at.0)))
    }

    fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> Status {
        call(|r| {
            let bytes = r.gpu().info().memory_bytes as usize;
            put(free, bytes);
            put(total, bytes);
            Ok(())
        })
    }

    fn cudaGetDevice(device: *mut c_int) -> Status {
        put(device, 0);
        SUCCESS
    }
    fn cudaGetDeviceCount(count: *mut c_int) -> Status {
        put(count, 1);
        SUCCESS
    }
    fn cudaRuntimeGetVersion(version: *mut c_int) -> Status {
        put(version, 13000);
        SUCCESS
    }
    fn cudaDriverGetVersion(version: *mut c_int) -> Status {
        put(version, 13000);
        SUCCESS
    }
    fn cudaDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) -> Status {
        call(|r| {
            let known = ATTRIBUTES.iter().find(|a| a.0 == attribute);
            put(value, known.map_or(0, |a| a.1(r.gpu())) as c_int);
            Ok(())
        })
    }
    fn cudaGetDeviceProperties(properties: *mut [u8; 1008], _device: c_int) -> Status {
        call(|r| {
            put(properties, properties_of(r.gpu().info()));
            Ok(())
        })
    }
    fn cuGetErrorString(status: Status, to: *mut *const c_char) -> Status {
        put(to, cudaGetErrorString(status));
        SUCCESS
    }
    fn cudaEventElapsedTime(milliseconds: *mut f32, _from: *mut c_void, _to: *mut c_void) -> Status {
        put(milliseconds, 1.0);
        SUCCESS
    }
    fn cudaEventCreate(event: *mut *mut c_void) -> Status {
        put(event, std::ptr::null_mut());
        SUCCESS
    }
    fn cudaEventCreateWithFlags(event: *mut *mut c_void, _flags: c_uint) -> Status {
        cudaEventCreate(event)
    }
    fn cudaStreamCreate(stream: *mut *mut c_void) -> Status {
        cudaEventCreate(stream)
    }
    fn cudaStreamCreateWithFlags(stream: *mut *mut c_void, _flags: c_uint) -> Status {
        cudaEventCreate(stream)
    }

    fn cudaGetDriverEntryPoint(
        name: *const c_char,
        to: *mut *const c_void,
        _flags: u64,
        found: *mut c_int,
    ) -> Status {
        let known = string(name) == "cuTensorMapEncodeTiled";
        put(to, if known { cuTensorMapEncodeTiled as *const c_void } else { std::ptr::null() });
        // `cudaDriverEntryPointSuccess`, `cudaDriverEntryPointSymbolNotFound`
        put(found, c_int::from(!known));
        SUCCESS
    }
    fn cudaGetDriverEntryPointByVersion(
        name: *const c_char,
        to: *mut *const c_void,
        _version: c_uint,
        flags: u64,
        found: *mut c_int,
    ) -> Status {
        cudaGetDriverEntryPoint(name, to, flags, found)
    }
    fn cuTensorMapEncodeTiled(
        map: *mut [u8; 128],
        data_type: c_uint,
        rank: c_uint,
        address: u64,
        dims: *const u64,
        strides: *const u64,
        box_dims: *const u32,
        element_strides: *const u32,
        interleave: c_uint,
        swizzle: c_uint,
        promotion: c_uint,
        fill: c_uint,
    ) -> Status {
        let n = rank as usize;
        // None of the driver's numbers reaches 256.
        let code = |v: c_uint| u8::try_from(v).unwrap_or(u8::MAX);
        let described = (|| {
            Some(TensorMap {
                data_type: TensorDataType::from_code(code(data_type))?,
                address,
                dims: std::slice::from_raw_parts(dims, n).to_vec(),
                strides: std::slice::from_raw_parts(strides, n.saturating_sub(1)).to_vec(),
                box_dims: std::slice::from_raw_parts(box_dims, n).to_vec(),
                element_strides: std::slice::from_raw_parts(element_strides, n).to_vec(),
                interleave: Interleave::from_code(code(interleave))?,
                swizzle: TensorSwizzle::from_code(code(swizzle))?,
                l2_promotion: L2Promotion::from_code(code(promotion))?,
                out_of_bounds: OutOfBounds::from_code(code(fill))?,
                im2col: None,
            })
        })();
        call(|r| {
            let described = described.ok_or(INVALID_VALUE)?;
            let bytes = r.gpu().tensor_map(&described).map_err(|e| complain(&e, INVALID_VALUE))?;
            put(map, bytes);
            Ok(())
        })
    }
}

safe_exports! {
    fn cudaFuncSetAttribute(stub: *const c_void, _attribute: c_int, _value: c_int) -> Status {
        call(|r| r.kernel(stub).map(drop))
    }
    fn __cudaInitModule(_handle: *mut *mut c_void) -> c_char {
        0
    }
    fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared: usize, _stream: *mut c_void) -> c_uint {
        PUSHED.with_borrow_mut(|p| p.push((grid, block, shared)));
        0
    }
    fn cudaFree(at: u64) -> Status {
        call(|r| match at {
            0 => Ok(()),
            _ => r.gpu().free(DevicePtr(at)).map_err(|e| complain(&e, INVALID_VALUE)),
        })
    }
    fn cudaFreeAsync(at: u64, _stream: *mut c_void) -> Status {
        cudaFree(at)
    }
    fn cuMemsetD32Async(at: u64, value: c_uint, count: usize, _stream: *mut c_void) -> Status {
        let refused = |e: Error| complain(&e, INVALID_VALUE);
        call(|r| r.gpu().copy_to(DevicePtr(at), &value.to_le_bytes().repeat(count)).map_err(refused))
    }
    fn cudaMemset(at: u64, value: c_int, bytes: usize) -> Status {
        let refused = |e: Error| complain(&e, INVALID_VALUE);
        call(|r| r.gpu().memset(DevicePtr(at), value as u8, bytes).map_err(refused))
    }
    fn cudaMemsetAsync(at: u64, value: c_int, bytes: usize, _stream: *mut c_void) -> Status {
        cudaMemset(at, value, bytes)
    }
    fn cudaGetLastError() -> Status {
        with(|r| std::mem::take(&mut r.last))
    }
    fn cudaPeekAtLastError() -> Status {
        with(|r| r.last)
    }
    fn cudaGetErrorString(status: Status) -> *const c_char {
        match status {
            SUCCESS => c"no error".as_ptr(),
            OUT_OF_MEMORY => c"out of memory".as_ptr(),
            INVALID_FUNCTION => c"invalid device function".as_ptr(),
            LAUNCH_FAILURE => c"the kernel failed".as_ptr(),
            _ => c"invalid value".as_ptr(),
        }
    }
    fn cudaGetErrorName(status: Status) -> *const c_char {
        cudaGetErrorString(status)
    }
}

nothing! {
    __cudaRegisterFatBinaryEnd, __cudaUnregisterFatBinary, cudaSetDevice, cudaDeviceSynchronize,
    cudaStreamSynchronize, cudaStreamDestroy, cudaStreamWaitEvent, cudaEventDestroy, cudaEventRecord,
    cudaEventSynchronize, cudaDeviceSetLimit, cudaDeviceSetCacheConfig, cudaFuncSetCacheConfig,
}
