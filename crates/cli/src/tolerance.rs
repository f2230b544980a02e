//! How far a result may be from the reference, by the format it is stored in.

use std::fmt;

use dualgemm::gemm::{AFormat, Comparison, Epilogue, compare};
use dualgemm::strategies::Rounding;
use dualgemm::{AnyPlan, Plan};
use serde::Serialize;

/// Limits on single elements, and on relative L2 error and cosine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tolerance {
    /// Whether every element is held to its own bound, as [`Comparison::max_of_bound`] has it. Then the limits on all
    /// elements together only say whether the tensor scale of an nvfp4 result fits.
    pub within_bound: bool,
    /// Largest relative L2 error.
    pub max_rel_l2: f64,
    /// Least cosine.
    pub min_cosine: f64,
    /// Largest error of an element of floats, as [`Comparison::max_rel`] has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_rel: Option<f64>,
    /// Most steps of the e2m1 grid that an element of nvfp4 is off, under the scales that the result has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<u64>,
    /// Steps within which every block scale and every element of nvfp4 is right where the first two are no worse than the
    /// tensor scale, which is given, makes them: values too large or too small for it are lost to no fault of the result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_scale_steps: Option<u64>,
    /// Units in the last place within which every element is right whatever the other two are, as values that
    /// underflow are: floats only, since an nvfp4 result has scales of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_ulp: Option<u64>,
}

impl Tolerance {
    /// Against another result, whose own errors are not known: what rounding to the format and f32 accumulation over any
    /// real K leave room for. A right result lies well below, one with a wrong scale anywhere well above. nvfp4 itself loses about 0.095 on real data, and hides a wrong
    /// scale in that: but a right value falls to one code or the next.
    ///
    /// Where gate and up are rounded to bf16 on the way, values near the border between two bf16 numbers may fall to
    /// either side, and a few in ten thousand do.
    pub fn of(format: AFormat, epilogue: &Epilogue) -> Self {
        let max_rel_l2 = match format {
            AFormat::F32 if epilogue.round_gate_up_to_bf16 => 1e-3,
            AFormat::F32 => 1e-5,
            AFormat::F16 => 1e-3,
            AFormat::Bf16 => 5e-3,
            AFormat::Nvfp4 | AFormat::Mxfp4 => 0.15,
        };
        let limits = Self::from_rel_l2(max_rel_l2);
        if matches!(format, AFormat::Nvfp4 | AFormat::Mxfp4) {
            return Self { max_steps: Some(1), ..limits };
        }
        // Elements have up to ten times the usual error; under a wrong scale it is a thousand times as large.
        Self { max_rel: Some(20.0 * max_rel_l2), max_ulp: Some(1), ..limits }
    }

    /// Against the reference, which says what each element may be off by.
    pub fn bounded(format: AFormat, epilogue: &Epilogue) -> Self {
        Self { within_bound: true, max_rel: None, max_ulp: None, ..Self::of(format, epilogue) }
    }

    /// The same for a plan, which may round on the way: a library's products are 16 bits before the activation, and
    /// operands may be e4m3.
    pub fn of_plan(plan: &AnyPlan, format: AFormat) -> Result<Self, dualgemm::Error> {
        let (first, second) = plan.products();
        let mut most: Option<f64> = None;
        for product in second.into_iter().chain([first]) {
            if let Plan::Gpu { plan, .. } = product
                && plan.strategy()?.rounding() != Rounding::Nothing
            {
                most = Some(most.unwrap_or(0.0).max(dualgemm::strategies::measure::bound(plan)?));
            }
        }
        let last = plan.last().desc();
        Ok(match most {
            Some(most) => Self::from_rel_l2(most),
            None if last.out.is_dynamic() => Self::bounded(format, &last.epilogue),
            None => Self::bounded(format, &last.epilogue).under_given_scale(),
        })
    }

    /// A relative L2 limit with the cosine that goes with it.
    pub fn from_rel_l2(max_rel_l2: f64) -> Self {
        // An error of relative length ε turns a vector by at most asin ε.
        let min_cosine = 1.0 - max_rel_l2 * max_rel_l2;
        let (max_rel, max_steps, max_scale_steps, max_ulp) = (None, None, None, None);
        Self { within_bound: false, max_rel_l2, min_cosine, max_rel, max_steps, max_scale_steps, max_ulp }
    }

    /// The same for a result whose tensor scale, if it has one, is the one it has to have.
    pub fn under_given_scale(self) -> Self {
        Self { max_scale_steps: self.max_steps, ..self }
    }

    /// Whether a comparison is within all limits, or rounding alone explains it; NaN is in none.
    pub fn holds(&self, found: &Comparison) -> bool {
        if self.within_bound {
            let scales = found.max_scale_steps.is_none_or(|steps| steps == 0);
            let fits = self.max_steps.is_none() || self.is_lost(found) || self.is_near(found);
            return found.max_of_bound <= 1.0 && scales && fits;
        }
        let elements = self.max_rel.is_none_or(|most| found.max_rel <= most)
            && self.max_steps.is_none_or(|most| found.max_ulp <= most);
        (self.is_lost(found) || self.is_near(found)) && elements
            || self.max_ulp.is_some_and(|most| found.max_ulp <= most)
    }

    /// Whether a given tensor scale explains what is lost. Values beside the border of two codes lose the same by either.
    fn is_lost(&self, found: &Comparison) -> bool {
        let scales =
            self.max_scale_steps.zip(found.max_scale_steps).is_some_and(|(most, steps)| steps <= most);
        scales && found.nearest_rel_l2.is_some_and(|least| found.rel_l2 <= 1.1 * least)
    }

    fn is_near(&self, found: &Comparison) -> bool {
        found.rel_l2 <= self.max_rel_l2 && found.cosine >= self.min_cosine
    }

    /// [`holds`](Self::holds) in words.
    pub fn verdict(&self, found: &Comparison) -> &'static str {
        match (self.holds(found), found.max_scale_steps) {
            (false, _) => "WRONG",
            (true, _) if found.not_finite > 0 => "right, but not finite",
            (true, Some(_)) if !self.is_near(found) => "right, but its tensor scale does not fit the values",
            (true, _) => "right",
        }
    }
}

impl fmt::Display for Tolerance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.within_bound {
            f.write_str("allowed per element: what f32 sums may be off by, (6·√K + 16)·2⁻²⁴·Σ|a·b|, through the activation, and half a step of C")?;
            return match self.max_steps {
                Some(_) => write!(
                    f,
                    " under its scales; block scales within these, relative L2 ≤ {:e}",
                    self.max_rel_l2
                ),
                None => Ok(()),
            };
        }
        write!(f, "allowed: relative L2 ≤ {:e} and cosine ≥ {}", self.max_rel_l2, self.min_cosine)?;
        if let Some(rel) = self.max_rel {
            write!(f, ", {rel:e} of any element and its row's RMS")?;
        }
        if let Some(steps) = self.max_steps {
            write!(f, ", {steps} step of any element")?;
        }
        if let Some(steps) = self.max_scale_steps {
            write!(f, ", or that, {steps} step of any block scale and what the tensor scale loses")?;
        }
        self.max_ulp.map_or(Ok(()), |ulp| write!(f, ", or {ulp} ulp everywhere"))
    }
}

/// What a comparison found, the same in every report: the verdict with the error of all elements together, the worst
/// element with what it may be off by, and where the limits come from.
pub struct Statement<'a> {
    pub found: &'a Comparison,
    /// What is allowed.
    pub tolerance: &'a Tolerance,
    /// Which elements were compared, and with what: follows the error.
    pub compared: String,
}

impl fmt::Display for Statement<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found, tolerance, compared } = self;
        let Comparison { worst, elements, .. } = found;
        writeln!(f, "{}: relative L2 error {:.1e}{compared}", tolerance.verdict(found), found.rel_l2)?;
        write!(f, "worst element C[{},{}] is off by {:.1e}", worst.row, worst.col, worst.error())?;
        match worst.bound.filter(|_| tolerance.within_bound) {
            Some(bound) => writeln!(f, ", where {bound:.1e} is allowed")?,
            None => writeln!(f, " from {:.1e}", worst.want)?,
        }
        if !tolerance.holds(found) {
            let compare::Worst { row, col, got, want, got_bits, want_bits, .. } = worst;
            writeln!(
                f,
                "C[{row},{col}] is {got:e} ({got_bits:#x}), the reference {want:e} ({want_bits:#x})"
            )?;
        }
        for (count, what) in [
            (if tolerance.within_bound { found.over_bound } else { 0 }, "off by more than is allowed"),
            (
                found.not_finite,
                "not finite, and neither is the reference: a number of A is not, or C's type is too narrow",
            ),
            (found.overflowed, "not compared: a number on the way to C exceeds its type (f32: 3.4e38)"),
        ] {
            if count > 0 {
                writeln!(f, "{count} of {elements} elements are {what}")?;
            }
        }
        write!(f, "{tolerance}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that comes from the values fits them, or is wrong.
    #[test]
    fn only_a_given_tensor_scale_explains_what_is_lost() {
        use dualgemm::formats::{BlockFormat, ScaleLayout};
        use dualgemm::gemm::{DualGemmDesc, OutFormat, OutScale};
        for (global_scale, steps) in [(OutScale::Static(1.0), Some(1)), (OutScale::Dynamic, None)] {
            let mut desc = DualGemmDesc::new(1, 16, 16, AFormat::Nvfp4, BlockFormat::Nvfp4);
            desc.out = OutFormat::Nvfp4 { scale_layout: ScaleLayout::Linear, global_scale };
            let plan = AnyPlan::new(&dualgemm::AnyDesc::Product(desc), &dualgemm::Target::default()).unwrap();
            assert_eq!(Tolerance::of_plan(&plan, AFormat::Nvfp4).unwrap().max_scale_steps, steps);
        }
    }

    #[test]
    fn not_a_number_never_holds() {
        let nan = Comparison::new(&[f32::NAN, 1.0], &[1.0, 1.0], 2).unwrap();
        assert!(!Tolerance::of(AFormat::Nvfp4, &Epilogue::default()).holds(&nan));
        assert!(!Tolerance::of(AFormat::F32, &Epilogue::default()).holds(&nan));
        let same = Comparison::new(&[2.0f32, 1.0], &[2.0, 1.0], 2).unwrap();
        assert!(Tolerance::of(AFormat::F32, &Epilogue::default()).holds(&same));
    }

    #[test]
    fn values_that_underflow_are_right_where_they_round_to_what_was_found() {
        let tiny = Comparison::new(&[half::f16::ZERO, half::f16::from_bits(1)], &[2e-8, 4e-8], 2).unwrap();
        assert!(tiny.rel_l2 > 0.4 && tiny.max_ulp == 0);
        assert!(Tolerance::of(AFormat::F16, &Epilogue::default()).holds(&tiny));
        assert!(!Tolerance::of(AFormat::Nvfp4, &Epilogue::default()).holds(&tiny));
    }
}
