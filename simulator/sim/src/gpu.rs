//! The simulated GPU: memory, modules and launches behind [`Device`].

use crate::check::launches::Launches;
use crate::config::Config;
use crate::decode::link;
use crate::error::Error as LoadError;
use crate::machine::grid::{self, Launch, volume};
use crate::memory::Space;
use crate::memory::global::Global;
use crate::program::Kernel;
use crate::progress::Progress;
use crate::report::Counters;
use crate::semantics::dot::Generation;
use crate::trap::Trap;
use dualgemm_device::{Args, Device, DeviceInfo, DevicePtr, Error, FunctionId, LaunchSpec, ModuleId, Stream};
use dualgemm_ptx::Space as VarSpace;
use dualgemm_ptx::ast::{self, Linkage};
use dualgemm_ptx::layout::{TENSOR_MAP_BYTES, TensorMap};
use dualgemm_ptx::legal;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a finished launch left behind.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The kernel.
    pub kernel: Arc<Kernel>,
    /// What was counted.
    pub counters: Counters,
    /// What it printed.
    pub output: String,
    /// CTAs of the grid.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub dynamic_shared: u32,
}

#[derive(Debug)]
struct Module {
    kernels: Vec<Arc<Kernel>>,
    constant: Vec<u8>,
    variables: BTreeMap<String, (DevicePtr, usize)>,
}

#[derive(Debug)]
struct State {
    global: Global,
    modules: Vec<Module>,
    /// Launches that the next one may overlap with, by stream.
    launches: HashMap<Stream, Launches>,
    last: Option<Outcome>,
    trap: Option<Trap>,
}

/// A simulated GPU.
#[derive(Debug)]
pub struct Gpu {
    config: Config,
    info: DeviceInfo,
    progress: Arc<Progress>,
    state: Mutex<State>,
}

fn bad_pointer(ptr: DevicePtr, bytes: usize, reason: String) -> Error {
    Error::BadPointer { ptr, bytes: bytes as u64, reason }
}

/// Whether PTX for `target` (such as `sm_90a`) runs on a card of this capability.
fn runs_on(target: &str, arch: dualgemm_device::Arch) -> bool {
    let digits = target.trim_start_matches("sm_");
    let number: String = digits.chars().take_while(char::is_ascii_digit).collect();
    let Ok(number) = number.parse::<u32>() else { return false };
    let (major, minor) = (number / 10, number % 10);
    match digits.strip_prefix(&number.to_string()) {
        Some("a") => (major, minor) == (arch.major, arch.minor),
        Some("f") => major == arch.major && minor <= arch.minor,
        _ => (major, minor) <= (arch.major, arch.minor),
    }
}

fn generation(target: &str) -> Generation {
    let digits = target.trim_start_matches("sm_").trim_end_matches(['a', 'f']);
    match digits.parse::<u32>() {
        Ok(..=88) | Err(_) => Generation::Ampere,
        Ok(89) => Generation::Ada,
        Ok(90..=99) => Generation::Hopper,
        Ok(_) => Generation::Blackwell,
    }
}

impl Gpu {
    /// A GPU with empty memory.
    pub fn new(config: Config) -> Gpu {
        let card = config.card.data();
        let info = DeviceInfo {
            name: format!("simulated {}", card.name),
            arch: card.arch,
            sm_count: card.sm_count,
            shared_per_cta: card.shared_per_cta,
            shared_per_sm: card.shared_per_sm,
            registers_per_sm: 65536,
            l2_bytes: card.l2_bytes,
            memory_bytes: card.memory_bytes,
        };
        let global = Global::new(card.memory_bytes);
        let state = State { global, modules: Vec::new(), launches: HashMap::new(), last: None, trap: None };
        Gpu { config, info, progress: Arc::default(), state: Mutex::new(state) }
    }

    /// [`Device::launch`], which is safe here.
    pub fn launch(&self, spec: &LaunchSpec) -> Result<(), Error> {
        // SAFETY: a kernel's addresses are looked up in the simulated memory, and one that is nowhere there ends the launch.
        unsafe { self.launch_on(Stream::Own, spec) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held left plain data behind; it stays usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state when every launch has ended: nothing later overlaps with them.
    fn settled(&self) -> MutexGuard<'_, State> {
        let mut state = self.state();
        state.launches.clear();
        state
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How far its launch has come; whoever holds it may stop that.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// What the last successful launch left behind; taken.
    pub fn take_outcome(&self) -> Option<Outcome> {
        self.state().last.take()
    }

    /// The trap of the last failed launch, as data; taken.
    pub fn take_trap(&self) -> Option<Trap> {
        self.state().trap.take()
    }

    /// A decoded kernel.
    ///
    /// # Errors
    /// [`Error::BadHandle`].
    pub fn kernel(&self, function: FunctionId) -> Result<Arc<Kernel>, Error> {
        let state = self.state();
        let module = state.modules.get(function.module.0 as usize);
        let kernel = module.and_then(|m| m.kernels.get(function.index as usize));
        kernel.cloned().ok_or(Error::BadHandle { what: "function" })
    }

    fn load_module(&self, text: &str) -> Result<Module, LoadError> {
        let ast = dualgemm_ptx::parse::module(text)?;
        let target = ast.target.first().map_or("", |t| t.as_str());
        if !runs_on(target, self.info.arch) {
            return Err(LoadError::refused(
                0,
                target,
                format!(
                    "this target does not run on the simulated {} ({}); choose the card in Config",
                    self.config.card.data().name,
                    self.info.arch
                ),
            ));
        }
        if let Some(illegal) = legal::check_foreign(&ast).into_iter().next() {
            return Err(illegal.into());
        }
        let mut variables = BTreeMap::new();
        match self.link(&ast, generation(target), &mut variables) {
            Ok((kernels, constant)) => Ok(Module { kernels, constant, variables }),
            Err(error) => {
                let global = &mut self.state().global;
                for (at, _) in variables.values() {
                    global.free(at.0);
                }
                Err(error)
            }
        }
    }

    /// The kernels of a module and its constants; `variables` are those that are given memory.
    fn link(
        &self,
        ast: &ast::Module,
        generation: Generation,
        variables: &mut BTreeMap<String, (DevicePtr, usize)>,
    ) -> Result<(Vec<Arc<Kernel>>, Vec<u8>), LoadError> {
        let mut state = self.state();
        let mut symbols = link::Symbols::new();
        let mut constant_bytes = 0;
        for v in ast.variables() {
            let error = |reason: String| LoadError::refused(v.line.0, &v.name, reason);
            if !matches!(v.space, VarSpace::Global | VarSpace::Const) {
                continue;
            }
            if v.linkage == Linkage::Extern {
                return Err(error("it is .extern, and there is no other module to define it".into()));
            }
            let at = if v.space == VarSpace::Global {
                let bytes = v.bytes().ok_or_else(|| error("its size is not known".into()))?;
                let at = state.global.alloc(bytes, v.alignment().into(), Some(v.name.to_string()));
                let at = at.ok_or_else(|| error(format!("its {bytes} bytes do not fit in memory")))?;
                variables.insert(v.name.to_string(), (DevicePtr(at), bytes as usize));
                (Space::Global, at)
            } else {
                let (at, _) = link::lay_out(&mut constant_bytes, (0, link::CONST_LIMIT), v)?;
                (Space::Const, at.into())
            };
            symbols.insert(v.name.clone(), at);
        }
        // Tables of functions hold these. Kernels have functions of their own by the same names.
        for (name, address) in link::function_pointers(ast) {
            symbols.entry(name).or_insert((Space::Global, address));
        }
        let mut constant = vec![0; constant_bytes as usize];
        for v in ast.variables() {
            let Some((space, at)) = symbols.get(&v.name) else { continue };
            let bytes = link::initial_bytes(v, &symbols)?;
            match space {
                Space::Const => constant[*at as usize..][..bytes.len()].copy_from_slice(&bytes),
                // The allocation was made for these bytes just above.
                _ => drop(state.global.write(*at, &bytes)),
            }
        }
        drop(state);
        let mut kernels = Vec::new();
        for f in ast.functions() {
            if f.kind == dualgemm_ptx::ast::FunctionKind::Entry && f.body.is_some() {
                kernels.push(Arc::new(link::kernel(ast, f, &symbols, generation)?));
            }
        }
        Ok((kernels, constant))
    }

    fn check_launch(&self, kernel: &Kernel, spec: &LaunchSpec) -> Result<(), String> {
        let threads = volume(spec.block);
        let [_, grid_y, grid_z] = spec.grid;
        if !(1..=1024).contains(&threads) || spec.block[2] > 64 {
            return Err(format!("a CTA of {:?} threads: 1 to 1024 are allowed, 64 in z", spec.block));
        }
        if let Some(want) = kernel.reqntid
            && want != spec.block
        {
            return Err(format!("a CTA of {:?} threads: the kernel declares .reqntid {want:?}", spec.block));
        }
        if let Some(most) = kernel.maxntid
            && threads > volume(most)
        {
            return Err(format!("a CTA of {threads} threads: the kernel declares .maxntid {most:?}"));
        }
        let shape = cluster_of(kernel, spec);
        let cluster = volume(shape);
        if let Some(want) = kernel.cluster
            && want != shape
        {
            return Err(format!("a cluster of {shape:?}: the kernel declares .reqnctapercluster {want:?}"));
        }
        if !(1..=16).contains(&cluster) {
            return Err(format!("a cluster of {cluster} CTAs: 1 to 16 are allowed"));
        }
        if (0..3).any(|i| spec.grid[i] == 0 || !spec.grid[i].is_multiple_of(shape[i])) {
            return Err(format!("a grid of {:?} CTAs is not made of clusters of {shape:?}", spec.grid));
        }
        if volume(spec.grid) > i32::MAX as u64 || grid_y.max(grid_z) > 65535 {
            return Err(format!(
                "a grid of {:?} CTAs: 65535 are allowed in y and z, and 2147483647 are simulated",
                spec.grid
            ));
        }
        let shared = u64::from(kernel.dynamic_offset) + u64::from(spec.dynamic_shared);
        if shared > self.info.shared_per_cta.into() {
            return Err(format!(
                "{shared} bytes of shared memory: a CTA can have {} on this card",
                self.info.shared_per_cta
            ));
        }
        Ok(())
    }

    fn parameters(kernel: &Kernel, args: &Args) -> Result<Vec<u8>, String> {
        if args.len() != kernel.params.len() {
            return Err(format!("{} arguments for {} parameters", args.len(), kernel.params.len()));
        }
        let mut bytes = vec![0; kernel.param_bytes as usize];
        for (i, (arg, param)) in args.iter().zip(&kernel.params).enumerate() {
            if arg.bytes().len() != param.bytes as usize {
                return Err(format!(
                    "argument {i} is a {} of {} bytes, parameter `{}` has {}",
                    arg.kind(),
                    arg.bytes().len(),
                    param.name,
                    param.bytes
                ));
            }
            bytes[param.offset as usize..][..arg.bytes().len()].copy_from_slice(arg.bytes());
        }
        Ok(bytes)
    }
}

/// Runs a host program once for each seed, each time on a fresh GPU, so that asynchronous operations and warps
/// interleave differently. Returns the results in order of seeds.
///
/// # Errors
/// The first seed whose run fails, with its error.
pub fn explore<T, E>(
    config: &Config,
    seeds: impl IntoIterator<Item = u64>,
    mut run: impl FnMut(&Gpu) -> Result<T, E>,
) -> Result<Vec<T>, (u64, E)> {
    let once = |seed| run(&Gpu::new(config.clone().seed(seed))).map_err(|e| (seed, e));
    seeds.into_iter().map(once).collect()
}

/// The shape of a cluster: a launch that names none takes the one the kernel declares.
fn cluster_of(kernel: &Kernel, spec: &LaunchSpec) -> [u32; 3] {
    if spec.cluster == [1, 1, 1] { kernel.cluster.unwrap_or(spec.cluster) } else { spec.cluster }
}

impl Device for Gpu {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn alloc(&self, bytes: usize) -> Result<DevicePtr, Error> {
        let mut state = self.state();
        let available = state.global.available();
        let base = state.global.alloc(bytes as u64, 256, None);
        base.map(DevicePtr).ok_or(Error::OutOfMemory { requested: bytes as u64, available })
    }

    fn free(&self, ptr: DevicePtr) -> Result<(), Error> {
        if self.settled().global.free(ptr.0) {
            return Ok(());
        }
        Err(bad_pointer(ptr, 0, "it is not the start of a live allocation".into()))
    }

    fn copy_to(&self, dst: DevicePtr, src: &[u8]) -> Result<(), Error> {
        self.settled().global.write(dst.0, src).map_err(|f| bad_pointer(dst, src.len(), f.message))
    }

    fn copy_from(&self, dst: &mut [u8], src: DevicePtr) -> Result<(), Error> {
        let n = dst.len();
        self.settled().global.read(src.0, dst).map_err(|f| bad_pointer(src, n, f.message))
    }

    fn memset(&self, dst: DevicePtr, value: u8, bytes: usize) -> Result<(), Error> {
        self.copy_to(dst, &vec![value; bytes])
    }

    fn load(&self, ptx: &str) -> Result<ModuleId, Error> {
        let module = self.load_module(ptx).map_err(|e| Error::Load(e.to_string()))?;
        let mut state = self.state();
        state.modules.push(module);
        Ok(ModuleId(state.modules.len() as u64 - 1))
    }

    fn function(&self, module: ModuleId, name: &str) -> Result<FunctionId, Error> {
        let state = self.state();
        let m = state.modules.get(module.0 as usize).ok_or(Error::BadHandle { what: "module" })?;
        match m.kernels.iter().position(|k| k.name == name) {
            Some(index) => Ok(FunctionId { module, index: index as u32 }),
            None => Err(Error::NoFunction {
                name: name.into(),
                available: m.kernels.iter().map(|k| k.name.as_str()).collect::<Vec<_>>().join(", "),
            }),
        }
    }

    fn symbol(&self, module: ModuleId, name: &str) -> Result<(DevicePtr, usize), Error> {
        let state = self.state();
        let m = state.modules.get(module.0 as usize).ok_or(Error::BadHandle { what: "module" })?;
        m.variables.get(name).copied().ok_or_else(|| Error::NoSymbol {
            name: name.into(),
            available: m.variables.keys().cloned().collect::<Vec<_>>().join(", "),
        })
    }

    fn tensor_map(&self, map: &TensorMap) -> Result<[u8; TENSOR_MAP_BYTES], Error> {
        map.to_bytes().map_err(|e| Error::TensorMap(e.to_string()))
    }

    /// Every launch ends before this returns, so streams differ only in what may overlap.
    unsafe fn launch_on(&self, stream: Stream, spec: &LaunchSpec) -> Result<(), Error> {
        let kernel = self.kernel(spec.function)?;
        let refuse = |reason: String| Error::Launch { kernel: kernel.name.clone(), reason };
        self.check_launch(&kernel, spec).map_err(refuse)?;
        let params = Gpu::parameters(&kernel, &spec.args).map_err(refuse)?;
        let mut state = self.state();
        let mut launches = state.launches.remove(&stream).filter(|_| spec.programmatic).unwrap_or_default();
        let cluster = cluster_of(&kernel, spec);
        let clusters = spec.grid.iter().product::<u32>() / cluster.iter().product::<u32>();
        let clustered = cluster != [1, 1, 1] || kernel.cluster.is_some();
        let launch = Launch {
            kernel: &kernel,
            params: &params,
            grid: spec.grid,
            block: spec.block,
            cluster,
            clustered,
            dynamic_shared: spec.dynamic_shared,
            global: &state.global,
            constant: &state.modules[spec.function.module.0 as usize].constant,
            config: &self.config,
            solo: clusters == 1,
            releases: Mutex::default(),
            overlaps: &launches,
            progress: &self.progress,
        };
        let result = grid::run(&launch);
        match result {
            Ok((counters, output, did)) => {
                if self.config.checks.race {
                    launches.add(kernel.clone(), did);
                    state.launches.insert(stream, launches);
                }
                let (grid, block, dynamic_shared) = (spec.grid, spec.block, spec.dynamic_shared);
                state.last = Some(Outcome { kernel, counters, output, grid, block, dynamic_shared });
                Ok(())
            }
            Err(trap) => {
                let text = trap.to_string();
                state.trap = Some(*trap);
                Err(Error::Kernel(text))
            }
        }
    }

    fn synchronize(&self) -> Result<(), Error> {
        // Launches end before `launch` returns.
        drop(self.settled());
        Ok(())
    }
}
