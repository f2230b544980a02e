//! A [`Device`] that runs nothing and writes down what it is asked to launch.
//!
//! Memory are slots: slot `i` starts at the address `(i + 1) << 40`, so an address that comes back in an argument or in a
//! tensor map says which slot is meant, and how far into it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use dualgemm_device::{Args, Device, DeviceInfo, DevicePtr, Error, FunctionId, LaunchSpec, ModuleId, Stream};
use dualgemm_ptx::layout::{TENSOR_MAP_BYTES, TensorMap};

/// Bits of an address that count bytes of a slot.
const SLOT_BITS: u32 = 40;

/// A place in memory that only the machine that launches knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Which slot, in the order in which they were allocated.
    pub slot: usize,
    /// Bytes from its start.
    pub offset: u64,
}

/// A kernel argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Argument {
    /// A value, or a null address.
    Bytes(Vec<u8>),
    /// An address.
    Address(Place),
    /// A tensor map of the tensor at a place; its own address is 0.
    Map(Place, TensorMap),
}

/// A kernel launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// Index of the kernel.
    pub kernel: usize,
    /// CTAs in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a CTA in x, y, z.
    pub block: [u32; 3],
    /// CTAs of a cluster in x, y, z.
    pub cluster: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub dynamic_shared: u32,
    /// May start before the launch before has ended.
    pub programmatic: bool,
    /// The arguments in parameter order.
    pub args: Vec<Argument>,
}

/// What was loaded and launched.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recording {
    /// PTX texts, all different.
    pub modules: Vec<String>,
    /// Kernels: the index of the module and the name.
    pub kernels: Vec<(usize, String)>,
    /// Launches in order.
    pub launches: Vec<Launch>,
    slots: usize,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Recorder {
    info: DeviceInfo,
    state: Mutex<Recording>,
}

impl Recorder {
    /// Nothing recorded yet, for a device that `info` describes.
    pub fn new(info: DeviceInfo) -> Self {
        Self { info, state: Mutex::default() }
    }

    /// What was loaded and launched so far.
    pub fn recording(&self) -> Recording {
        self.state().clone()
    }

    fn state(&self) -> MutexGuard<'_, Recording> {
        // A panic while the lock was held left plain data behind; it stays usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn no_memory(call: &'static str) -> Error {
        Error::Driver { call, reason: "launches are written down, and there is no memory behind them".into() }
    }
}

/// The slot that an address lies in, of `slots`.
fn place(address: u64, slots: usize) -> Result<Place, Error> {
    let slot = (address >> SLOT_BITS).checked_sub(1).filter(|&slot| slot < slots as u64);
    let slot = slot.ok_or(Error::BadPointer {
        ptr: DevicePtr(address),
        bytes: 0,
        reason: "it lies in no slot".into(),
    })?;
    Ok(Place { slot: slot as usize, offset: address & ((1 << SLOT_BITS) - 1) })
}

fn arguments(args: &Args, slots: usize) -> Result<Vec<Argument>, Error> {
    let one = |(bytes, kind): (&[u8], &str)| {
        let whole: Option<[u8; 8]> = bytes.try_into().ok();
        match (kind, whole.map(u64::from_le_bytes)) {
            ("pointer", Some(address)) if address != 0 => Ok(Argument::Address(place(address, slots)?)),
            ("tensor map", _) => {
                let refused = |reason: String| Error::TensorMap(reason);
                let record = bytes.try_into().map_err(|_| refused(format!("{} bytes", bytes.len())))?;
                let map = TensorMap::from_bytes(record).map_err(|e| refused(e.to_string()))?;
                Ok(Argument::Map(place(map.address, slots)?, TensorMap { address: 0, ..map }))
            }
            _ => Ok(Argument::Bytes(bytes.into())),
        }
    };
    args.iter().map(|arg| one((arg.bytes(), arg.kind()))).collect()
}

impl Device for Recorder {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn alloc(&self, _: usize) -> Result<DevicePtr, Error> {
        let mut state = self.state();
        state.slots += 1;
        Ok(DevicePtr((state.slots as u64) << SLOT_BITS))
    }

    fn free(&self, _: DevicePtr) -> Result<(), Error> {
        Ok(())
    }

    fn copy_to(&self, _: DevicePtr, _: &[u8]) -> Result<(), Error> {
        Err(Self::no_memory("copy_to"))
    }

    fn copy_from(&self, _: &mut [u8], _: DevicePtr) -> Result<(), Error> {
        Err(Self::no_memory("copy_from"))
    }

    fn memset(&self, _: DevicePtr, _: u8, _: usize) -> Result<(), Error> {
        Err(Self::no_memory("memset"))
    }

    fn load(&self, ptx: &str) -> Result<ModuleId, Error> {
        let mut state = self.state();
        let known = state.modules.iter().position(|module| module == ptx);
        let index = known.unwrap_or_else(|| {
            state.modules.push(ptx.into());
            state.modules.len() - 1
        });
        Ok(ModuleId(index as u64))
    }

    fn function(&self, module: ModuleId, name: &str) -> Result<FunctionId, Error> {
        let mut state = self.state();
        let kernel = (module.0 as usize, name.to_string());
        let text = state.modules.get(kernel.0).ok_or(Error::BadHandle { what: "module" })?;
        let names = text.split(".entry ").skip(1);
        let names: Vec<&str> = names.map(|t| t.split(['(', '{', '\n']).next().unwrap_or(t).trim()).collect();
        if !names.contains(&name) {
            return Err(Error::NoFunction { name: name.into(), available: names.join(", ") });
        }
        let index = state.kernels.iter().position(|known| *known == kernel).unwrap_or_else(|| {
            state.kernels.push(kernel);
            state.kernels.len() - 1
        });
        Ok(FunctionId { module, index: index as u32 })
    }

    fn symbol(&self, _: ModuleId, _: &str) -> Result<(DevicePtr, usize), Error> {
        Err(Self::no_memory("symbol"))
    }

    fn tensor_map(&self, map: &TensorMap) -> Result<[u8; TENSOR_MAP_BYTES], Error> {
        map.to_bytes().map_err(|e| Error::TensorMap(e.to_string()))
    }

    unsafe fn launch_on(&self, _: Stream, spec: &LaunchSpec) -> Result<(), Error> {
        let mut state = self.state();
        let kernel = spec.function.index as usize;
        if kernel >= state.kernels.len() {
            return Err(Error::BadHandle { what: "function" });
        }
        let args = arguments(&spec.args, state.slots)?;
        let &LaunchSpec { grid, block, cluster, dynamic_shared, programmatic, .. } = spec;
        state.launches.push(Launch { kernel, grid, block, cluster, dynamic_shared, programmatic, args });
        Ok(())
    }

    fn synchronize(&self) -> Result<(), Error> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_ptx::layout::{Swizzle, TensorDataType};
    use dualgemm_sim::report::Card;

    const PTX: &str = ".version 8.0\n.target sm_90a\n.visible .entry f(\n\t.param .u32 x\n)\n{ ret; }\n";

    #[test]
    fn launches_come_back_with_places_for_addresses_exact() {
        let recorder = Recorder::new(crate::gpumode::info(Card::H100));
        let function = recorder.function(recorder.load(PTX).unwrap(), "f").unwrap();
        assert_eq!(recorder.function(recorder.load(PTX).unwrap(), "f").unwrap(), function);
        let (first, second) = (recorder.alloc(1).unwrap(), recorder.alloc(1).unwrap());
        let swizzle = Swizzle::B128;
        let map = TensorMap::matrix(TensorDataType::U8, second.0 + 256, (8, 128), 128, (8, 128), swizzle);
        let args = Args::new()
            .u32(7)
            .ptr(first.offset(16))
            .ptr(DevicePtr::NULL)
            .tensor_map(recorder.tensor_map(&map).unwrap());
        let spec = LaunchSpec::new(function, [3, 2, 1], [32, 1, 1]).cluster([1, 2, 1]).args(args);
        // SAFETY: the recorder runs nothing.
        unsafe { recorder.launch(&spec.programmatic(true)) }.unwrap();
        let recording = recorder.recording();
        assert_eq!(
            (recording.modules.as_slice(), recording.kernels.len()),
            ([PTX.to_string()].as_slice(), 1)
        );
        let launch = &recording.launches[0];
        assert_eq!((launch.grid, launch.cluster, launch.programmatic), ([3, 2, 1], [1, 2, 1], true));
        let [a, b, c, d] = launch.args.as_slice() else { panic!("{:?}", launch.args) };
        assert_eq!(*a, Argument::Bytes(vec![7, 0, 0, 0]));
        assert_eq!(*b, Argument::Address(Place { slot: 0, offset: 16 }));
        assert_eq!(*c, Argument::Bytes(vec![0; 8]));
        assert_eq!(*d, Argument::Map(Place { slot: 1, offset: 256 }, TensorMap { address: 0, ..map }));
    }

    #[test]
    fn what_cannot_be_written_down_is_refused() {
        let recorder = Recorder::new(crate::gpumode::info(Card::H100));
        let module = recorder.load(PTX).unwrap();
        let missing = recorder.function(module, "g").unwrap_err().to_string();
        assert_eq!(missing, "the module has no kernel `g`; it has: f");
        let function = recorder.function(module, "f").unwrap();
        let spec = LaunchSpec::new(function, [1; 3], [1; 3]).args(Args::new().ptr(DevicePtr(64)));
        // SAFETY: the recorder runs nothing.
        assert!(unsafe { recorder.launch(&spec) }.unwrap_err().to_string().contains("it lies in no slot"));
        assert!(recorder.copy_to(DevicePtr(64), &[1]).is_err());
    }
}
