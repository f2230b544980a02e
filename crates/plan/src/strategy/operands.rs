//! What a call brings to its kernels: weights of one pair or of groups, and where C goes; and kernels that are loaded when the
//! first weights that need them come.

use std::sync::OnceLock;

use dualgemm_device::DevicePtr;
use dualgemm_gemm::{DualGemmDesc, Epilogue, Operation, OutFormat, OutScale};
use dualgemm_kernels::fused::Weights as Operands;
use dualgemm_kernels::parts::groups::{GroupArgs, Groups};
use dualgemm_kernels::parts::rows::Output;

use super::one_group;
use crate::{DeviceC, DeviceCall, DeviceExperts, DeviceWeights, Error, GroupedCall, WeightForm};

#[derive(Debug, Clone, Copy)]
pub(super) enum Weights<'a> {
    One(&'a DeviceWeights),
    /// Experts, and which rows are whose.
    Groups(&'a DeviceExperts, OfGroups),
}

/// What a [`GroupedCall`] says of its rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct OfGroups {
    pub(super) rows: DevicePtr,
    pub(super) settled: bool,
    pub(super) choices: Option<usize>,
}

impl From<&GroupedCall> for OfGroups {
    fn from(&GroupedCall { rows, settled, choices, .. }: &GroupedCall) -> Self {
        Self { rows, settled, choices }
    }
}

/// Which problems a kernel is loaded for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    One,
    Groups,
    Choices,
}

impl Weights<'_> {
    /// What the call says of its rows, if they come in groups.
    pub(super) fn of_groups(self) -> Option<OfGroups> {
        match self {
            Self::One(_) => None,
            Self::Groups(_, of) => Some(of),
        }
    }

    fn kind(self) -> Kind {
        match self.of_groups() {
            None => Kind::One,
            Some(OfGroups { choices: None, .. }) => Kind::Groups,
            Some(_) => Kind::Choices,
        }
    }

    /// The rows of groups, if there are such.
    pub(super) fn groups(self) -> Option<Groups> {
        self.group_args().map(|groups| groups.of)
    }

    /// The same with what each group's sums are multiplied by.
    pub(super) fn group_args(self) -> Option<GroupArgs> {
        match self {
            Self::One(_) => None,
            Self::Groups(experts, OfGroups { rows, .. }) => {
                let of = Groups { count: experts.count(), rows };
                Some(GroupArgs { of, alphas: experts.alphas() })
            }
        }
    }

    /// Gate and up as a kernel reads them, those of groups behind each other; of gate and up apart each pack for itself.
    /// Fails if they are in another order than `form`.
    pub(super) fn operands(self, form: WeightForm, op: Operation) -> Result<Vec<Operands>, Error> {
        let parts = match self {
            Self::One(weights) => weights.parts(),
            Self::Groups(experts, ..) => experts.parts(),
        };
        Ok(match form {
            WeightForm::PackedApart => parts.packed_apart()?.map(Operands::Pack).into(),
            WeightForm::Plain | WeightForm::E4m3 | WeightForm::Atoms => {
                vec![Operands::Rows(parts.rows(form, op)?)]
            }
            _ => vec![Operands::Pack(parts.packed(op)?)],
        })
    }

    /// Biases of gate and up, those of groups behind each other, or null.
    pub(super) fn bias(self) -> [DevicePtr; 2] {
        match self {
            Self::One(weights) => weights.bias(),
            Self::Groups(experts, ..) => experts.bias(),
        }
    }

    /// What sums of gate and up are multiplied by, where A's tensor scale is `a_scale`. Of groups what they have in
    /// common: the rest is each one's own, in a table. Fails if all scales together are no normal f32, for any of the
    /// groups.
    pub(super) fn alpha(self, epilogue: &Epilogue, a_scale: f32) -> Result<[f32; 2], Error> {
        match self {
            Self::One(weights) => sum_factors(weights.alpha(), epilogue, a_scale),
            Self::Groups(experts, ..) => {
                experts.each_alpha().try_for_each(|own| sum_factors(own, epilogue, a_scale).map(drop))?;
                sum_factors([1.0; 2], epilogue, a_scale)
            }
        }
    }

    /// What kernels make of the sums, and where it goes; `a_scale` is A's tensor scale times what else a kernel owes its
    /// sums, `device_scale` the one in device memory or null.
    ///
    /// # Errors
    /// As [`alpha`](Self::alpha).
    pub(super) fn output(
        self,
        to: &Destination,
        epilogue: &Epilogue,
        a_scale: f32,
        device_scale: DevicePtr,
    ) -> Result<Output, Error> {
        let &Destination { c, scales, scale, .. } = to;
        let (alpha, bias) = (self.alpha(epilogue, a_scale)?, self.bias());
        Ok(Output { c, scales, scale, alpha, bias, a_scale: device_scale })
    }
}

/// What sums of gate and up are multiplied by: what belongs to the weights, the epilogue's factor and A's tensor scale.
/// Fails if that is no normal f32: what is less would lose digits, or be 0.
pub(super) fn sum_factors(weights: [f32; 2], epilogue: &Epilogue, a_scale: f32) -> Result<[f32; 2], Error> {
    let factor = |half, of_weights: f32, alpha: f32| {
        let exact = f64::from(of_weights) * f64::from(alpha) * f64::from(a_scale);
        let factor = exact as f32;
        match factor.is_normal() || alpha == 0.0 {
            true => Ok(factor),
            false => Err(Error::SumFactor { half, found: exact }),
        }
    };
    Ok([factor("gate", weights[0], epilogue.alpha_gate)?, factor("up", weights[1], epilogue.alpha_up)?])
}

/// A kernel for one pair of weights, for groups and for choices, without and with biases: each loaded when the first such weights come.
#[derive(Debug)]
pub(super) struct Variants<K> {
    /// Whether the plan is for groups.
    grouped: bool,
    loaded: [[OnceLock<K>; 2]; 3],
}

impl<K> Variants<K> {
    pub(super) fn new(grouped: bool) -> Self {
        Self { grouped, loaded: Default::default() }
    }

    /// The kernel for such weights; `load` is told what it is for, and whether there are biases.
    ///
    /// # Errors
    /// Those of `load`, and if rows come in groups, for which the plan is not.
    pub(super) fn get(
        &self,
        weights: Weights<'_>,
        load: impl FnOnce(Kind, bool) -> Result<K, Error>,
    ) -> Result<&K, Error> {
        if weights.kind() != Kind::One && !self.grouped {
            return Err(one_group());
        }
        self.load(weights.kind(), weights.bias() != [DevicePtr::NULL; 2], load)
    }

    /// The kernel that the plan is for, of weights without biases: what makes it fail does so before the first call.
    pub(super) fn first(&self, load: impl FnOnce(Kind, bool) -> Result<K, Error>) -> Result<&K, Error> {
        self.load(if self.grouped { Kind::Groups } else { Kind::One }, false, load)
    }

    fn load(
        &self,
        kind: Kind,
        bias: bool,
        load: impl FnOnce(Kind, bool) -> Result<K, Error>,
    ) -> Result<&K, Error> {
        let place = &self.loaded[kind as usize][usize::from(bias)];
        if let Some(kernel) = place.get() {
            return Ok(kernel);
        }
        let kernel = load(kind, bias)?;
        Ok(place.get_or_init(|| kernel))
    }
}

/// Where C of a call goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Destination {
    pub(super) c: DevicePtr,
    /// Block scales of an nvfp4 C, or null.
    pub(super) scales: DevicePtr,
    /// Its static tensor scale, or 1.
    pub(super) scale: f32,
    /// Where a dynamic one is written.
    pub(super) dynamic_scale: DevicePtr,
}

impl Destination {
    /// # Errors
    /// If C is not what the problem says.
    pub(super) fn of(call: &DeviceCall, desc: &DualGemmDesc) -> Result<Self, Error> {
        match (call.c, desc.out) {
            (DeviceC::Nvfp4 { codes, scales, global_scale }, OutFormat::Nvfp4 { global_scale: how, .. }) => {
                let scale = match how {
                    OutScale::Static(scale) => scale,
                    OutScale::Dynamic => 1.0,
                };
                Ok(Self { c: codes, scales, scale, dynamic_scale: global_scale })
            }
            (DeviceC::Float(c), OutFormat::F32 | OutFormat::F16 | OutFormat::Bf16) => {
                let null = DevicePtr::NULL;
                Ok(Self { c, scales: null, scale: 1.0, dynamic_scale: null })
            }
            (found, expected) => {
                let found = if matches!(found, DeviceC::Float(_)) { "floats" } else { "nvfp4" };
                Err(Error::Operand { tensor: "C", found: found.into(), expected: expected.to_string() })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_that_together_are_no_normal_f32_are_refused_by_name() {
        let tiny = 2f32.powi(-100);
        let epilogue = Epilogue { alpha_up: tiny, ..Epilogue::default() };
        assert_eq!(
            sum_factors([1.0, tiny], &epilogue, 1.0).unwrap_err().to_string(),
            "up: tensor scales of up and of A and the epilogue's alpha_up multiply its sums by 6.223015277861142e-61; on \
             a GPU valid are magnitudes of 1.1754944e-38 to 3.4028235e38 (on the CPU, all)"
        );
        // Two of the three factors together would be 0.
        assert_eq!(sum_factors([1.0, tiny], &epilogue, 2f32.powi(120)).unwrap()[1], 2f32.powi(-80));
        for (scale, a_scale) in [(1e-44, 1.0), (1e-25, 1e-25), (1e25, 1e25)] {
            assert!(
                sum_factors([scale, 1.0], &Epilogue::default(), a_scale)
                    .unwrap_err()
                    .to_string()
                    .starts_with("gate: ")
            );
        }
        let zero = Epilogue { alpha_gate: 0.0, ..Epilogue::default() };
        assert_eq!(sum_factors([1e-44, 1.0], &zero, 1.0).unwrap(), [0.0, 1.0]);
    }
}
