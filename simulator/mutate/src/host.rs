//! A host program, run with one module edited, and what became of it.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use dualgemm_device::{Device, Error, LaunchSpec, ModuleId, Stream, leave_to};
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::parse;
use dualgemm_sim::{Check, Config, Gpu};
use thiserror::Error;

use crate::kinds::Mutant;

/// Why a host program made no result.
pub type Refused = Box<dyn std::error::Error + Send + Sync>;

/// A host program: it loads, launches, and returns the bytes of its result, the same whatever the interleaving.
pub type Run<'r> = dyn Fn(&dyn Device) -> Result<Vec<u8>, Refused> + Sync + 'r;

/// What became of a mutant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// A check of the simulator stopped it.
    Stopped(Check),
    /// It ended, and its result is another.
    Wrong,
    /// It ended with the result of the original under every seed.
    Survived,
    /// It ended with that result, but nothing executes what it changes: a larger problem may.
    NotReached,
    /// It could not be loaded or launched; the reason.
    Refused(String),
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fate::Stopped(check) => f.write_str(check.name()),
            Fate::Wrong => f.write_str("wrong result"),
            Fate::Survived => f.write_str("survived"),
            Fate::NotReached => f.write_str("not reached"),
            Fate::Refused(reason) => write!(f, "refused: {reason}"),
        }
    }
}

/// Why a host program cannot be mutated.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum HostError {
    #[error("the program fails before anything is changed (seed {seed}): {reason}")]
    Fails { seed: u64, reason: String },
    /// It loads fewer modules.
    #[error("the program loads {loaded} modules; number {asked}, counted from 0, will be edited")]
    NoModule { loaded: usize, asked: usize },
    /// Its result depends on the seed.
    #[error("the program's result under seed {0} is another than under the first")]
    Varies(u64),
}

/// A host program with the module that is edited, and what it returns unedited.
pub struct Host<'r> {
    text: String,
    config: Config,
    seeds: Vec<u64>,
    run: &'r Run<'r>,
    module: Module,
    want: Vec<u8>,
}

impl<'r> Host<'r> {
    /// Runs the program as it is, under each of the seeds. Of the modules that it loads, number `module` is the one that
    /// is edited, and those with the same text. Fails if it fails, returns different results, or loads fewer modules.
    pub fn new(
        module: usize,
        config: Config,
        seeds: impl IntoIterator<Item = u64>,
        run: &'r Run<'r>,
    ) -> Result<Host<'r>, HostError> {
        let seeds: Vec<u64> = seeds.into_iter().collect();
        let (mut want, mut most, mut loaded) = (None, 0, Vec::new());
        for &seed in &seeds {
            let device = Edited::new(config.clone().seed(seed), None);
            let bytes = run(&device).map_err(|e| HostError::Fails { seed, reason: e.to_string() })?;
            if want.get_or_insert_with(|| bytes.clone()) != &bytes {
                return Err(HostError::Varies(seed));
            }
            most = most.max(device.most.load(Ordering::Relaxed));
            loaded = device.loaded.into_inner().unwrap_or_default();
        }
        let text = loaded.get(module).cloned();
        let text = text.ok_or(HostError::NoModule { loaded: loaded.len(), asked: module })?;
        let module = parse::module(&text).map_err(|e| HostError::Fails { seed: 0, reason: e.to_string() })?;
        // An endless loop is found soon, and a longer way through the kernel has room.
        let config = Config { max_instructions: 20 * most + 10_000, ..config };
        Ok(Host { text, config, seeds, run, module, want: want.unwrap_or_default() })
    }

    /// The module that is edited; its lines are those of the text that the program loads.
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// What becomes of a mutant: the first seed that shows something decides.
    pub fn run(&self, mutant: &Mutant) -> Fate {
        match self.of_text(&mutant.apply(&self.module)) {
            Fate::Survived if self.of_text(&mutant.trapped(&self.module)) == Fate::Survived => {
                Fate::NotReached
            }
            fate => fate,
        }
    }

    /// What becomes of the program with this text of the module.
    fn of_text(&self, text: &str) -> Fate {
        for &seed in &self.seeds {
            let device = Edited::new(self.config.clone().seed(seed), Some((&self.text, text)));
            match (self.run)(&device) {
                Ok(bytes) if bytes == self.want => {}
                Ok(_) => return Fate::Wrong,
                Err(error) => {
                    return match device.gpu.take_trap() {
                        Some(trap) => Fate::Stopped(trap.check),
                        None => Fate::Refused(error.to_string()),
                    };
                }
            }
        }
        Fate::Survived
    }
}

/// A simulated GPU that loads another text in place of one.
struct Edited<'a> {
    gpu: Gpu,
    /// What is replaced, and by what.
    edit: Option<(&'a str, &'a str)>,
    /// The texts that the program loaded.
    loaded: Mutex<Vec<String>>,
    /// Most instructions that one warp of each CTA, together, executed in a launch.
    most: AtomicU64,
}

impl<'a> Edited<'a> {
    fn new(config: Config, edit: Option<(&'a str, &'a str)>) -> Edited<'a> {
        Edited { gpu: Gpu::new(config), edit, loaded: Mutex::default(), most: AtomicU64::new(0) }
    }
}

impl Device for Edited<'_> {
    leave_to!(gpu);

    fn load(&self, ptx: &str) -> Result<ModuleId, Error> {
        if let Ok(mut loaded) = self.loaded.lock() {
            loaded.push(ptx.to_string());
        }
        match self.edit {
            Some((from, to)) if from == ptx => self.gpu.load(to),
            _ => self.gpu.load(ptx),
        }
    }

    unsafe fn launch_on(&self, stream: Stream, spec: &LaunchSpec) -> Result<(), Error> {
        // SAFETY: handles and addresses of this device are those of the simulated one, so what the caller promises of
        // `spec` here holds there; and that device fails a launch that leaves its memory.
        unsafe { self.gpu.launch_on(stream, spec) }?;
        let outcome = self.gpu.take_outcome();
        let warps = outcome.iter().flat_map(|outcome| &outcome.counters.instructions);
        let most = warps.map(|warp| warp.iter().sum()).max().unwrap_or(0);
        self.most.fetch_max(most, Ordering::Relaxed);
        Ok(())
    }
}
