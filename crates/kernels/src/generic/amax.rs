//! The largest magnitude of a matrix, in parts: each CTA writes one, whatever order they run in. The kernel that needs
//! it takes the maximum of the parts, so nothing has to be cleared before and the result does not depend on timing. Of rows
//! in groups those before the first group and behind the last one do not count: anything may lie there.

use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec};
use dualgemm_formats::FloatType;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::SmemLayout;

use super::quantize::Floats;
use super::rowwise::WIDTH;
use super::{load, module, take_turn, target_for, values};
use crate::Error;
use crate::error::refused;
use crate::parts::groups::{GroupRows, Groups};

/// Name of the kernel in its module.
pub const ENTRY: &str = "amax";
/// Most parts there are: what the workspace must hold, as f32.
pub const MAX_PARTS: u32 = 512;
const THREADS: u32 = 256;

/// Every kernel: the type of the floats, and whether they are of rows in groups.
pub fn configs() -> Vec<(FloatType, bool)> {
    FloatType::ALL.into_iter().flat_map(|ty| [false, true].map(|grouped| (ty, grouped))).collect()
}

/// A name that tells them apart.
pub fn name(&(ty, grouped): &(FloatType, bool)) -> String {
    format!("{}{}", ty.name(), if grouped { "_grouped" } else { "" })
}

/// Generates the kernel for floats of this type, of rows in groups or in one.
pub fn generate(ty: FloatType, grouped: bool, target: Target) -> Result<Module, Error> {
    let about = format!("largest magnitudes of {}", name(&(ty, grouped)));
    module(target, &about, ENTRY, |k| emit(k, (ty, grouped), target))
}

fn emit(k: &mut Kernel, (ty, grouped): (FloatType, bool), target: Target) {
    k.required_threads(THREADS);
    let sizes = [k.param::<U32>("units"), k.param::<U32>("units_per_row")];
    let (start, pitch, parts) = (k.pointer("values"), k.param::<U32>("value_pitch"), k.pointer("parts"));
    let groups = grouped.then(|| GroupRows::declare(k));
    let mut smem = SmemLayout::new();
    let of_warps = smem.alloc("of_warps", THREADS / 32 * 4, 4);
    let base = k.shared(&smem);
    take_turn(k, target);
    let [mut units, per_row] = sizes.map(|size| k.ld_param(&size));
    let (start, pitch) = (k.ld_pointer(&start), k.ld_param(&pitch));
    let (thread, cta, ctas) =
        (k.special(Special::TidX), k.special(Special::CtaidX), k.special(Special::NctaidX));
    let amax = k.mov(0.0f32);
    let mut unit = k.eval(cta * THREADS + thread);
    if let Some(groups) = &groups {
        let (first, last) = groups.ends(k);
        let (before, end) = (k.eval(first * per_row), k.eval(last * per_row));
        unit = k.eval(unit + before);
        units = k.eval(units.min(end));
    }
    let step = k.eval(ctas * THREADS);
    k.loop_("units", |k, this| {
        let done = k.compare(Cmp::Ge, unit, units);
        k.break_if(this, done);
        let (row, unit_of_row) = (k.eval(unit / per_row), k.eval(unit % per_row));
        let from = k.offset(start, unit_of_row.mul_wide(WIDTH * values::bytes(ty)) + row.mul_wide(pitch));
        let loaded = values::load(k, ty, from);
        let of_these = values::amax(k, &loaded);
        k.to(amax).max(amax, of_these);
        k.to(unit).eval(unit + step);
    });
    for distance in [16u32, 8, 4, 2, 1] {
        let other = k.shuffle(Shuffle::Xor, amax, distance);
        k.to(amax).max(amax, other);
    }
    let first_lane = k.compare(Cmp::Eq, thread & 31, 0u32);
    let slot = k.offset(base.at(of_warps.offset), (thread >> 5) << 2);
    k.when(first_lane).st(slot, amax);
    k.cta_sync();
    let first = k.compare(Cmp::Eq, thread, 0u32);
    k.if_(first, "write", |k| {
        let mut amax = k.mov(0.0f32);
        for warp in 0..THREADS / 32 {
            let of_warp: Reg<F32> = k.ld(base.at(of_warps.offset + 4 * warp));
            amax = k.max(amax, of_warp);
        }
        let parts = k.ld_pointer(&parts);
        let to = k.offset(parts, cta.mul_wide(4));
        k.st(to, amax);
    });
}

/// The kernel, loaded on a device.
#[derive(Debug, Clone, Copy)]
pub struct Amax {
    function: FunctionId,
    ty: FloatType,
    grouped: bool,
}

impl Amax {
    /// Loads the kernel for floats of this type, of rows in groups or in one.
    pub fn new(device: &dyn Device, ty: FloatType, grouped: bool) -> Result<Self, Error> {
        let module = generate(ty, grouped, target_for(device.info().arch))?;
        Ok(Self { function: load(device, &module, ENTRY)?, ty, grouped })
    }

    /// How many parts the kernel writes for an `[m, k]` matrix.
    pub fn parts(m: usize, k: usize) -> u32 {
        (m * k).div_ceil((WIDTH * THREADS) as usize).min(MAX_PARTS as usize) as u32
    }

    /// The launch that writes the parts, [`parts`](Self::parts) f32, to `parts`.
    ///
    /// # Errors
    /// If the matrix breaks a rule of [`Floats`], or has more than 2³² times eight elements, or there are groups for a
    /// kernel without, or none.
    pub fn spec(&self, a: &Floats, parts: DevicePtr, groups: Option<&Groups>) -> Result<LaunchSpec, Error> {
        a.check("A", self.ty)?;
        let units = a.m * a.k / WIDTH as usize;
        let Ok(units) = u32::try_from(units) else {
            return refused("A", format!("[{}, {}]", a.m, a.k), "at most 2^35 elements");
        };
        let args =
            Args::new().u32(units).u32(a.k as u32 / WIDTH).ptr(a.values).u32(a.pitch as u32).ptr(parts);
        let args = Groups::args_if(groups, self.grouped, "A", args)?;
        let grid = [Self::parts(a.m, a.k), 1, 1];
        Ok(LaunchSpec::new(self.function, grid, [THREADS, 1, 1]).dynamic_shared(THREADS / 32 * 4).args(args))
    }
}
