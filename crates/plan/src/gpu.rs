//! A GPU with what is shared by every plan on it: loaded kernels, NVIDIA's library, memory that frees itself.
//!
//! A GPU stays open as long as the process runs, as the driver's contexts do anyway; everything refers to it without
//! counting.

use std::any::{Any, TypeId};
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use dualgemm_cuda::{Blas, Cuda};
use dualgemm_device::{Device, DevicePtr, Error, LaunchSpec, ModuleId, Stream, leave_to};
use dualgemm_formats::ScaleLayout;

/// A GPU, real or simulated. As a [`Device`] it loads each PTX text once, however often it is asked for.
pub struct Gpu {
    device: Arc<dyn Device>,
    /// The same device, if it is a card: for what only cards have (graphs, events, libraries, a clock).
    cuda: Option<Arc<Cuda>>,
    driver: String,
    modules: Mutex<HashMap<TextKey, ModuleId>>,
    kernels: Mutex<HashMap<(TypeId, ScaleLayout), Box<dyn Any + Send>>>,
    load_us: AtomicU64,
    blas: OnceLock<Result<Blas, Error>>,
}

/// 128 bits of hash and the length: texts that differ have different keys.
type TextKey = (u64, u64, usize);

fn text_key(ptx: &str) -> TextKey {
    let hash = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, ptx).hash(&mut hasher);
        hasher.finish()
    };
    (hash(0), hash(1), ptx.len())
}

impl Gpu {
    /// The card of that number, opened the first time.
    ///
    /// # Errors
    /// If there is no driver or no such card.
    pub fn cuda(ordinal: i32) -> Result<&'static Self, Error> {
        static OPEN: Mutex<BTreeMap<i32, &'static Gpu>> = Mutex::new(BTreeMap::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&gpu) = open.get(&ordinal) {
            return Ok(gpu);
        }
        let cuda = Arc::new(Cuda::open(ordinal)?);
        let version = Cuda::driver_version()?;
        let driver = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
        let gpu: &'static Self = Box::leak(Box::new(Self::new(cuda.clone(), Some(cuda), driver)));
        open.insert(ordinal, gpu);
        Ok(gpu)
    }

    /// Any other device, such as a simulated one; it stays open, too.
    pub fn of(device: Arc<dyn Device>) -> &'static Self {
        Box::leak(Box::new(Self::new(device, None, String::new())))
    }

    fn new(device: Arc<dyn Device>, cuda: Option<Arc<Cuda>>, driver: String) -> Self {
        let (modules, kernels) = (Mutex::default(), Mutex::default());
        Self { device, cuda, driver, modules, kernels, load_us: AtomicU64::new(0), blas: OnceLock::new() }
    }

    /// The card, if this is one.
    pub fn card(&self) -> Option<&Arc<Cuda>> {
        self.cuda.as_ref()
    }

    /// The driver, such as `CUDA 13.0`; empty for a simulated GPU.
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// NVIDIA's library, looked for once.
    ///
    /// # Errors
    /// If this is no card or the library is not found.
    pub fn blas(&self) -> Result<&Blas, Error> {
        let open = || match &self.cuda {
            Some(cuda) => Blas::open(cuda),
            None => Err(Error::Driver {
                call: "loading cuBLASLt",
                reason: format!("{} cannot run NVIDIA's libraries", self.device.info().name),
            }),
        };
        self.blas.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// The kernel of a type for scales in a layout. It is generated and loaded the first time; to generate it and find it
    /// loaded takes half a millisecond.
    pub(crate) fn kernel<K: Copy + Send + 'static, E>(
        &self,
        layout: ScaleLayout,
        load: impl FnOnce() -> Result<K, E>,
    ) -> Result<K, E> {
        let key = (TypeId::of::<K>(), layout);
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&kernel) = kernels.get(&key).and_then(|kernel| kernel.downcast_ref()) {
            return Ok(kernel);
        }
        let kernel = load()?;
        kernels.insert(key, Box::new(kernel));
        Ok(kernel)
    }

    /// Copies between memories of this GPU, after what its own stream was given before.
    ///
    /// # Errors
    /// If a range is not inside one allocation; the failure of an earlier launch.
    pub fn copy_within(&self, dst: DevicePtr, src: DevicePtr, bytes: usize) -> Result<(), Error> {
        if let Some(card) = &self.cuda {
            return card.copy_within(dst, src, bytes);
        }
        // Memory of a simulated GPU is the host's anyway.
        let mut host = vec![0; bytes];
        self.copy_from(&mut host, src)?;
        self.copy_to(dst, &host)
    }

    /// Microseconds spent so far on assembling and loading kernels: what the first use of each costs.
    pub fn load_us(&self) -> u64 {
        self.load_us.load(Ordering::Relaxed)
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("info", self.device.info()).finish_non_exhaustive()
    }
}

impl Device for Gpu {
    leave_to!(device);

    fn load(&self, ptx: &str) -> Result<ModuleId, Error> {
        // Held while the text is assembled: a second thread that wants the same text waits for it.
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let key = text_key(ptx);
        if let Some(&module) = modules.get(&key) {
            return Ok(module);
        }
        let start = Instant::now();
        let module = self.device.load(ptx)?;
        let took = start.elapsed().as_micros() as u64;
        self.load_us.fetch_add(took, Ordering::Relaxed);
        tracing::debug!(took_us = took, bytes = ptx.len(), "loaded a kernel");
        modules.insert(key, module);
        Ok(module)
    }

    unsafe fn launch_on(&self, stream: Stream, spec: &LaunchSpec) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.device.launch_on(stream, spec) }
    }
}

/// Device memory that is freed with its owner.
#[derive(Debug)]
pub struct Buffer {
    gpu: &'static Gpu,
    ptr: DevicePtr,
    bytes: usize,
    /// What it is a part of, which then is what is freed.
    whole: Option<Arc<Buffer>>,
}

impl Buffer {
    /// Memory with undefined contents.
    pub fn new(gpu: &'static Gpu, bytes: usize) -> Result<Self, Error> {
        Ok(Self { gpu, ptr: gpu.alloc(bytes)?, bytes, whole: None })
    }

    /// Some of the bytes of a buffer, which lives as long as they do.
    pub fn part(whole: &Arc<Self>, first: usize, bytes: usize) -> Result<Self, Error> {
        let ptr = whole.ptr.offset(first as u64);
        if first.checked_add(bytes).is_none_or(|end| end > whole.bytes) {
            let reason = format!("the buffer has {} bytes", whole.bytes);
            return Err(Error::BadPointer { ptr, bytes: bytes as u64, reason });
        }
        Ok(Self { gpu: whole.gpu, ptr, bytes, whole: Some(whole.clone()) })
    }

    /// Memory that holds these bytes.
    pub fn of(gpu: &'static Gpu, bytes: &[u8]) -> Result<Self, Error> {
        let buffer = Self::new(gpu, bytes.len())?;
        gpu.copy_to(buffer.ptr, bytes)?;
        Ok(buffer)
    }

    /// A copy in memory of its own.
    ///
    /// # Errors
    /// If it does not fit; the failure of an earlier launch.
    pub fn duplicate(&self) -> Result<Self, Error> {
        let mut bytes = vec![0; self.bytes];
        self.read(&mut bytes)?;
        Self::of(self.gpu, &bytes)
    }

    /// Memory that holds zeros.
    pub fn zeroed(gpu: &'static Gpu, bytes: usize) -> Result<Self, Error> {
        let buffer = Self::new(gpu, bytes)?;
        gpu.memset(buffer.ptr, 0, bytes)?;
        Ok(buffer)
    }

    /// Where it starts: at a multiple of 256 bytes, if it is no part of another.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Overwrites its beginning.
    ///
    /// # Errors
    /// If `bytes` are more than it has.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Error> {
        self.gpu.copy_to(self.ptr, bytes)
    }

    /// Its beginning, after every launch on the device's own stream.
    ///
    /// # Errors
    /// If `bytes` are more than it has; the failure of an earlier launch.
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), Error> {
        self.gpu.copy_from(bytes, self.ptr)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.whole.is_none() {
            // Fails only if a kernel has broken the context, and then everything is gone anyway.
            let _ = self.gpu.free(self.ptr);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_loaded_once_and_another_one_again() {
        let gpu = Gpu::of(Arc::new(dualgemm_sim::Gpu::new(dualgemm_sim::Config::default())));
        let text = |name: &str| {
            format!(
                ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry {name}()\n{{\n\tret;\n}}\n"
            )
        };
        let first = gpu.load(&text("a")).unwrap();
        assert_eq!(gpu.load(&text("a")).unwrap(), first);
        assert_ne!(gpu.load(&text("b")).unwrap(), first);
    }

    #[test]
    fn buffers_return_their_memory() {
        let gpu = Gpu::of(Arc::new(dualgemm_sim::Gpu::new(dualgemm_sim::Config::default())));
        let buffer = Buffer::of(gpu, &[1, 2, 3]).unwrap();
        let mut back = [0; 3];
        buffer.read(&mut back).unwrap();
        assert_eq!(back, [1, 2, 3]);
        let ptr = buffer.ptr();
        drop(buffer);
        assert!(gpu.copy_to(ptr, &[0]).is_err(), "freed memory is not written");
        let whole = Arc::new(Buffer::of(gpu, &[1, 2, 3]).unwrap());
        let part = Buffer::part(&whole, 1, 2).unwrap();
        assert!(Buffer::part(&whole, 2, 2).is_err() && Buffer::part(&whole, usize::MAX, 2).is_err());
        let ptr = whole.ptr();
        drop(whole);
        let mut back = [0; 2];
        part.read(&mut back).unwrap();
        assert_eq!(back, [2, 3], "a part keeps the whole");
        drop(part);
        assert!(gpu.copy_to(ptr, &[0]).is_err());
    }
}
