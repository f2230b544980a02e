//! The card and what programs have registered: binaries, kernels, variables. Launches go through here and are traced and
//! recorded.

use crate::abi::{INVALID_FUNCTION, INVALID_VALUE, LAUNCH_FAILURE, SUCCESS, Status};
use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec, ModuleId};
use dualgemm_sim::Kernel;
use dualgemm_sim::{Card, Checks, Config, Gpu};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub(crate) struct Runtime {
    /// PTX of each registered binary, and its module once loaded.
    pub(crate) binaries: Vec<(String, Option<ModuleId>)>,
    /// Host stub to binary and kernel name.
    pub(crate) kernels: HashMap<usize, (usize, String)>,
    /// Host variable to binary and name.
    pub(crate) variables: HashMap<usize, (usize, String)>,
    gpu: Option<Gpu>,
    pub(crate) last: Status,
    launches: usize,
}

static RUNTIME: Mutex<Option<Runtime>> = Mutex::new(None);

struct Held(MutexGuard<'static, Option<Runtime>>);

impl Held {
    fn take() -> Held {
        Held(RUNTIME.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn runtime(&mut self) -> &mut Runtime {
        self.0.get_or_insert_default()
    }
}

pub(crate) fn with<T>(f: impl FnOnce(&mut Runtime) -> T) -> T {
    f(Held::take().runtime())
}

/// Runs a call and remembers its status.
pub(crate) fn call(f: impl FnOnce(&mut Runtime) -> Result<(), Status>) -> Status {
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
    pub(crate) fn gpu(&mut self) -> &Gpu {
        let binaries = &self.binaries;
        self.gpu.get_or_insert_with(|| {
            let targets = binaries.iter().filter_map(|(ptx, _)| target(ptx));
            let card = match targets.max() {
                Some(103) => Card::B300,
                Some(100..=109) => Card::B200,
                Some(121) => Card::Gb10,
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
            let config = Config::default();
            let max_instructions = number("SIM_LIMIT", config.max_instructions);
            let config = Config { seed: number("SIM_SEED", config.seed), max_instructions, ..config };
            Gpu::new(config.card(card).checks(checks))
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

    pub(crate) fn kernel(&mut self, stub: *const c_void) -> Result<Arc<Kernel>, Status> {
        let (_, _, function) = self.function(stub)?;
        self.gpu().kernel(function).map_err(|e| complain(&e, INVALID_FUNCTION))
    }

    pub(crate) fn variable(&mut self, host: *const c_void) -> Result<DevicePtr, Status> {
        let (binary, name) = self.variables.get(&(host as usize)).cloned().ok_or(INVALID_VALUE)?;
        let module = self.module(binary)?;
        let found = self.gpu().symbol(module, &name);
        found.map(|(at, _)| at).map_err(|e| complain(&e, INVALID_VALUE))
    }

    /// # Safety
    /// `args` has a pointer to each parameter of the kernel.
    pub(crate) unsafe fn launch(
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

pub(crate) fn complain(error: &dyn std::fmt::Display, status: Status) -> Status {
    eprintln!("{error}");
    status
}

/// The whole number in this variable of the environment, or what holds without it.
fn number(variable: &str, without: u64) -> u64 {
    let Some(text) = std::env::var_os(variable) else { return without };
    text.to_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| {
        eprintln!("{variable}={}: not a whole number from 0 to 2^64 - 1", text.display());
        std::process::exit(2)
    })
}

fn write(path: &str, bytes: &[u8]) {
    if let Err(e) = std::fs::write(path, bytes) {
        eprintln!("{path}: {e}");
    }
}
