//! NVIDIA's library products (cuBLASLt), the peer that fused kernels are measured against.
//!
//! The library is looked for at run time and only when asked for; nothing else needs it. Only what one plain product
//! takes is bound here, and one of nvfp4 operands, which the library has from version 12.8 on for Blackwell: written by its
//! documentation, not yet run on silicon. API: <https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api>.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use dualgemm_device::{DevicePtr, Error, Stream};
use libloading::Library;

use crate::Cuda;

/// Where the library may be found, newest first; the loader searches its usual places (`LD_LIBRARY_PATH`).
const NAMES: [&str; 4] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so", "cublasLt64_13.dll"];

/// `CUBLAS_COMPUTE_32F` and `CUDA_R_32F`.
const COMPUTE_32F: c_int = 68;
const TYPE_32F: c_int = 0;
/// `CUBLASLT_MATMUL_DESC_TRANSA`, `CUBLAS_OP_T`, `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`.
const DESC_TRANSA: c_int = 3;
const OP_T: i32 = 1;
const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
/// `CUBLASLT_MATMUL_DESC_{A,B}_SCALE_POINTER` and `_SCALE_MODE`, of the library's first and second operand.
const DESC_SCALE_POINTERS: [c_int; 2] = [17, 18];
const DESC_SCALE_MODES: [c_int; 2] = [31, 32];
/// `CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3`: a scale per 16 elements, in 128x4 order.
const SCALE_VEC16_UE4M3: i32 = 1;
/// `CUDA_R_4F_E2M1`.
const TYPE_E2M1: c_int = 33;
/// Elements of nvfp4 in 16 bytes; rows of operands start at multiples of it.
const NVFP4_ROW_STEP: usize = 32;
/// 16-bit elements in 16 bytes; rows of the result start at multiples of it.
const RESULT_ROW_STEP: usize = 8;

/// The 16-bit type of a product's operands and result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HalfType {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
}

impl HalfType {
    /// `CUDA_R_16F` or `CUDA_R_16BF`.
    fn code(self) -> c_int {
        match self {
            Self::F16 => 2,
            Self::Bf16 => 14,
        }
    }
}

/// Algorithms that the library is asked to propose.
const ALGORITHMS: usize = 16;

/// M, N and K.
type Size = (usize, usize, usize);
type Handle = *mut c_void;
type Status = c_int;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Heuristic {
    algo: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// Declares the functions, their loading and the struct that holds them, from one list.
macro_rules! functions {
    ($($field:ident $symbol:literal ($($arg:ty),*) -> $ret:ty;)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl Functions {
            fn load(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the signatures are those of cublasLt.h, stable over versions 11 to 13.
                    $($field: *unsafe { library.get(concat!($symbol, "\0").as_bytes())? },)*
                })
            }
        }
    };
}

functions! {
    create "cublasLtCreate" (*mut Handle) -> Status;
    destroy "cublasLtDestroy" (Handle) -> Status;
    version "cublasLtGetVersion" () -> usize;
    status_name "cublasLtGetStatusName" (Status) -> *const c_char;
    desc_create "cublasLtMatmulDescCreate" (*mut Handle, c_int, c_int) -> Status;
    desc_set "cublasLtMatmulDescSetAttribute" (Handle, c_int, *const c_void, usize) -> Status;
    desc_destroy "cublasLtMatmulDescDestroy" (Handle) -> Status;
    layout_create "cublasLtMatrixLayoutCreate" (*mut Handle, c_int, u64, u64, i64) -> Status;
    layout_destroy "cublasLtMatrixLayoutDestroy" (Handle) -> Status;
    pref_create "cublasLtMatmulPreferenceCreate" (*mut Handle) -> Status;
    pref_set "cublasLtMatmulPreferenceSetAttribute" (Handle, c_int, *const c_void, usize) -> Status;
    pref_destroy "cublasLtMatmulPreferenceDestroy" (Handle) -> Status;
    heuristic "cublasLtMatmulAlgoGetHeuristic"
        (Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Heuristic, *mut c_int) -> Status;
    matmul "cublasLtMatmul" (
        Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void,
        Handle, *mut c_void, Handle, *const [u64; 8], *mut c_void, usize, *mut c_void
    ) -> Status;
}

/// The library, opened for one GPU. Dropped after the products made from it.
struct Open {
    cuda: Arc<Cuda>,
    functions: Functions,
    handle: Handle,
    // Unloaded last.
    _library: Library,
}

// SAFETY: the library's handle may be used from any thread.
unsafe impl Send for Open {}
// SAFETY: the library locks what of its handle changes; products only read the rest.
unsafe impl Sync for Open {}

impl Open {
    fn check(&self, call: &'static str, status: Status) -> Result<(), Error> {
        check(&self.functions, call, status)
    }
}

fn check(functions: &Functions, call: &'static str, status: Status) -> Result<(), Error> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the library returns a constant string for every number.
    let name = unsafe { CStr::from_ptr((functions.status_name)(status)) };
    Err(Error::Driver { call, reason: name.to_string_lossy().into_owned() })
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.cuda.enter().is_ok() {
            // SAFETY: created in `Blas::open`, destroyed once, after every product.
            let _ = unsafe { (self.functions.destroy)(self.handle) };
        }
    }
}

/// cuBLASLt on one GPU.
#[derive(Clone)]
pub struct Blas(Arc<Open>);

impl std::fmt::Debug for Blas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Blas({})", self.version())
    }
}

impl Blas {
    /// Finds the library and starts it.
    ///
    /// # Errors
    /// [`Error::Driver`], saying where it was looked for.
    pub fn open(cuda: &Arc<Cuda>) -> Result<Self, Error> {
        let library = NAMES.iter().find_map(|name| {
            // SAFETY: NVIDIA's library may be loaded at any time; its initializers ask nothing of the program.
            unsafe { Library::new(*name) }.ok()
        });
        let library = library.ok_or_else(|| Error::Driver {
            call: "loading cuBLASLt",
            reason: format!(
                "none of {} was found; it comes with CUDA and with PyTorch, in a directory to be named in \
                 LD_LIBRARY_PATH",
                NAMES.join(", ")
            ),
        })?;
        let functions = Functions::load(&library)
            .map_err(|e| Error::Driver { call: "loading cuBLASLt", reason: e.to_string() })?;
        cuda.enter()?;
        let mut handle = null_mut();
        // SAFETY: the result outlives the call; the context is current.
        check(&functions, "cublasLtCreate", unsafe { (functions.create)(&mut handle) })?;
        Ok(Self(Arc::new(Open { cuda: cuda.clone(), functions, handle, _library: library })))
    }

    /// The library's version, such as `13.1.0`.
    pub fn version(&self) -> String {
        // SAFETY: takes no arguments, and returns a constant of the library.
        let v = unsafe { (self.0.functions.version)() };
        // Five digits count 11.x and 12.x, six from 13 on: major · 10⁴, minor · 100, patch.
        format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
    }

    /// The product `C[m,n] = α · A[m,k] · B[n,k]ᵀ` of dense rows, with f32 sums, by the algorithm that the library
    /// thinks fastest with `workspace` bytes of scratch; [`Matmul::choose`] finds the one that is.
    ///
    /// # Errors
    /// [`Error::Driver`] if the library has no algorithm for it.
    pub fn matmul(&self, ty: HalfType, size: Size, workspace: usize) -> Result<Matmul, Error> {
        self.product(ty.code(), ty, size, workspace)
    }

    /// The same product of nvfp4 operands: rows of codes, and block scales in 128x4 order, padding zero. For Blackwell;
    /// not yet run on silicon.
    ///
    /// # Errors
    /// If K is no multiple of 32 or N none of 8, on which rows start at multiples of 16 bytes; [`Error::Driver`] if the
    /// library is older than 12.8 or has no algorithm, as on any card before Blackwell.
    pub fn matmul_nvfp4(&self, result: HalfType, (m, n, k): Size, workspace: usize) -> Result<Matmul, Error> {
        nvfp4_rule(n, k)?;
        self.product(TYPE_E2M1, result, (m, n, k), workspace)
    }

    fn product(
        &self,
        operand: c_int,
        result: HalfType,
        (m, n, k): Size,
        workspace: usize,
    ) -> Result<Matmul, Error> {
        let (f, open) = (&self.0.functions, &self.0);
        let scaled = operand == TYPE_E2M1;
        let mut product = Matmul {
            open: open.clone(),
            desc: null_mut(),
            layouts: [null_mut(); 3],
            algos: Vec::new(),
            workspace,
            scales: scaled.then(Mutex::default),
        };
        // SAFETY: the result outlives the call; `product` destroys what was made.
        let status = unsafe { (f.desc_create)(&mut product.desc, COMPUTE_32F, TYPE_32F) };
        open.check("cublasLtMatmulDescCreate", status)?;
        // Column-major, the library computes Cᵀ[n,m] = B · Aᵀ: its first operand is our B, transposed, its second our A.
        product.set("cublasLtMatmulDescSetAttribute", DESC_TRANSA, &OP_T)?;
        if scaled {
            let call = "cublasLtMatmulDescSetAttribute (block scales, from 12.8 on)";
            for attribute in DESC_SCALE_MODES {
                product.set(call, attribute, &SCALE_VEC16_UE4M3)?;
            }
            // Proposals depend on whether there are any, not on where.
            product.set_scales([DevicePtr(256); 2])?;
        }
        let types = [operand, operand, result.code()];
        let sizes = [(k, n), (k, m), (n, m)];
        for (layout, (ty, (rows, cols))) in product.layouts.iter_mut().zip(types.into_iter().zip(sizes)) {
            // SAFETY: the result outlives the call; `product` destroys what was made.
            let status = unsafe { (f.layout_create)(layout, ty, rows as u64, cols as u64, rows as i64) };
            open.check("cublasLtMatrixLayoutCreate", status)?;
        }
        product.algos = product.proposals()?;
        if product.algos.is_empty() {
            let operands = if scaled { "of nvfp4" } else { "" };
            return Err(Error::Driver {
                call: "cublasLtMatmulAlgoGetHeuristic",
                reason: format!("no algorithm for {m}x{n}x{k} {operands} in {result:?}"),
            });
        }
        Ok(product)
    }
}

/// Rows of nvfp4 operands and of a 16-bit result start at multiples of 16 bytes.
fn nvfp4_rule(n: usize, k: usize) -> Result<(), Error> {
    if k.is_multiple_of(NVFP4_ROW_STEP) && n.is_multiple_of(RESULT_ROW_STEP) {
        return Ok(());
    }
    Err(Error::Driver {
        call: "a cuBLASLt product of nvfp4",
        reason: format!(
            "N = {n}, K = {k}; N has to be a multiple of {RESULT_ROW_STEP} and K of {NVFP4_ROW_STEP}, so that rows start \
             at multiples of 16 bytes"
        ),
    })
}

/// One product with its algorithms; the first is used; see [`Blas::matmul`].
pub struct Matmul {
    open: Arc<Open>,
    desc: Handle,
    /// Of the library's first and second operand and its result.
    layouts: [Handle; 3],
    algos: Vec<[u64; 8]>,
    workspace: usize,
    /// Held while block scales, which are part of the description, are set and a product is started.
    scales: Option<Mutex<()>>,
}

// SAFETY: descriptors are plain memory that is only read after `Blas::matmul`, but for addresses of scales, which a mutex
// guards.
unsafe impl Send for Matmul {}
// SAFETY: shared references only read descriptors; the mutex is held while scales are set and used.
unsafe impl Sync for Matmul {}

impl Matmul {
    /// Writes an attribute of the description, of the type that the library has for it.
    fn set<T>(&self, call: &'static str, attribute: c_int, value: &T) -> Result<(), Error> {
        let bytes = std::ptr::from_ref(value).cast();
        // SAFETY: the description lives as long as this product; the value, whose size is given, is copied.
        let status = unsafe { (self.open.functions.desc_set)(self.desc, attribute, bytes, size_of::<T>()) };
        self.open.check(call, status)
    }

    /// The algorithms that the library proposes, the one that it thinks fastest first.
    fn proposals(&self) -> Result<Vec<[u64; 8]>, Error> {
        let (open, f) = (&self.open, &self.open.functions);
        let mut pref = null_mut();
        // SAFETY: the result outlives the call, and is destroyed below.
        open.check("cublasLtMatmulPreferenceCreate", unsafe { (f.pref_create)(&mut pref) })?;
        let limit = (&raw const self.workspace).cast();
        // SAFETY: made above; the value, whose size is given, is copied.
        let set = unsafe { (f.pref_set)(pref, PREF_MAX_WORKSPACE_BYTES, limit, size_of::<usize>()) };
        let [b, a, c] = self.layouts;
        let (mut found, mut count) = ([Heuristic::default(); ALGORITHMS], 0);
        let (most, results) = (ALGORITHMS as c_int, found.as_mut_ptr());
        let status = match set {
            // SAFETY: every handle came from the library and lives; there is room for as many results as are asked for.
            0 => unsafe {
                (f.heuristic)(open.handle, self.desc, b, a, c, c, pref, most, results, &mut count)
            },
            failed => failed,
        };
        // SAFETY: made above, used no more.
        unsafe { (f.pref_destroy)(pref) };
        open.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        let found = found.iter().take(count.max(0) as usize);
        Ok(found.filter(|algo| algo.state == 0).map(|algo| algo.algo).collect())
    }

    /// Measures the algorithms that the library proposes and keeps the fastest. Overwrites C and waits.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    ///
    /// # Errors
    /// As there; the failure of an earlier kernel.
    pub unsafe fn choose(
        &mut self,
        operands: [DevicePtr; 3],
        scales: Option<[DevicePtr; 2]>,
        workspace: DevicePtr,
    ) -> Result<(), Error> {
        self.take_scales(scales)?;
        let cuda = self.open.cuda.clone();
        let mut best = (f64::INFINITY, 0);
        for algo in 0..self.algos.len() {
            // SAFETY: the caller's promise.
            let run = || unsafe { self.launch_by(algo, Stream::Own, 1.0, operands, workspace) };
            // Proposals may turn out to be unsupported; the first run also loads the kernel.
            if run().is_err() {
                continue;
            }
            cuda.time_us(|| (0..2).try_for_each(|_| run()))?;
            let us = cuda.time_us(|| (0..5).try_for_each(|_| run()))?;
            best = if us < best.0 { (us, algo) } else { best };
        }
        self.algos.swap(0, best.1);
        Ok(())
    }

    /// Writes the addresses of the scales of A and of B into the description.
    fn set_scales(&self, [a, b]: [DevicePtr; 2]) -> Result<(), Error> {
        if self.scales.is_none() {
            let reason = "its operands are 16-bit floats, which have no block scales".into();
            return Err(Error::Driver { call: "a cuBLASLt product", reason });
        }
        // The library's first operand is our B.
        for (attribute, scale) in DESC_SCALE_POINTERS.into_iter().zip([b, a]) {
            self.set("cublasLtMatmulDescSetAttribute (addresses of scales)", attribute, &scale.0)?;
        }
        Ok(())
    }

    /// The scales of operands that have any, and of no others.
    fn take_scales(&self, scales: Option<[DevicePtr; 2]>) -> Result<(), Error> {
        match scales {
            Some(scales) => self.set_scales(scales),
            None if self.scales.is_none() => Ok(()),
            None => {
                let reason = "its operands are nvfp4, which have block scales".into();
                Err(Error::Driver { call: "a cuBLASLt product", reason })
            }
        }
    }

    /// Starts it on a stream, of nvfp4 operands with the block scales of A and of B. `workspace` has the bytes asked for when
    /// the product was made.
    ///
    /// # Safety
    /// Until it has ended, A, B, their scales, C and the workspace are live device memory of the sizes that the product was made
    /// for, and nobody writes the former or uses the latter two in between.
    ///
    /// # Errors
    /// [`Error::Driver`]; if there are scales of operands that have none, or none.
    pub unsafe fn launch(
        &self,
        stream: Stream,
        alpha: f32,
        operands: [DevicePtr; 3],
        scales: Option<[DevicePtr; 2]>,
        workspace: DevicePtr,
    ) -> Result<(), Error> {
        let _alone = self.scales.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.take_scales(scales)?;
        // SAFETY: the caller's promise.
        unsafe { self.launch_by(0, stream, alpha, operands, workspace) }
    }

    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn launch_by(
        &self,
        algo: usize,
        stream: Stream,
        alpha: f32,
        [a, b, c]: [DevicePtr; 3],
        workspace: DevicePtr,
    ) -> Result<(), Error> {
        let (open, beta) = (&self.open, 0f32);
        open.cuda.enter()?;
        let address = |ptr: DevicePtr| ptr.0 as usize as *mut c_void;
        let [b_layout, a_layout, c_layout] = self.layouts;
        // SAFETY: descriptors and algorithm belong together and outlive the call, as do the scalars, which are read
        // before it returns; the caller vouches for the device memory.
        let status = unsafe {
            (open.functions.matmul)(
                open.handle,
                self.desc,
                (&raw const alpha).cast(),
                address(b),
                b_layout,
                address(a),
                a_layout,
                (&raw const beta).cast(),
                address(c),
                c_layout,
                address(c),
                c_layout,
                &self.algos[algo],
                address(workspace),
                self.workspace,
                open.cuda.raw_stream(stream),
            )
        };
        open.check("cublasLtMatmul", status)
    }
}

impl Drop for Matmul {
    fn drop(&mut self) {
        let f = &self.open.functions;
        for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
            // SAFETY: created in `Blas::product`, destroyed once.
            unsafe { (f.layout_destroy)(layout) };
        }
        if !self.desc.is_null() {
            // SAFETY: created in `Blas::product`, destroyed once.
            unsafe { (f.desc_destroy)(self.desc) };
        }
    }
}

impl std::fmt::Debug for Matmul {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matmul").field("algorithms", &self.algos.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_nvfp4_start_at_multiples_of_16_bytes_or_are_refused() {
        assert!(nvfp4_rule(8, 32).is_ok() && nvfp4_rule(4096, 7168).is_ok());
        for (n, k) in [(8, 16), (8, 48), (4, 32), (7, 64)] {
            let message = nvfp4_rule(n, k).unwrap_err().to_string();
            assert!(message.contains(&format!("N = {n}, K = {k}")), "{message}");
        }
    }
}
