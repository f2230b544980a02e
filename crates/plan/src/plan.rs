//! How a problem is computed on a GPU, as a value: printable, serializable, free of addresses.

use dualgemm_device::DeviceInfo;
use dualgemm_formats::ScaleLayout;
use dualgemm_gemm::{DualGemmDesc, Operation};

use crate::choices::Choices;
use crate::prologue::compute_type;
use crate::strategy::{STRATEGIES, Strategy, strategy};
use crate::{Error, Gpu, Prepared, WeightForm};

/// What a caller may fix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuOptions {
    /// The strategy, by name; without it, the fastest that is known.
    pub strategy: Option<String>,
    /// Its kernel, by name; without it, the fastest that is known.
    pub kernel: Option<String>,
    /// Order of the block scales of a quantized A in device memory; the host's may come in any.
    pub a_scale_layout: ScaleLayout,
    /// In about how many groups rows come, each with weights of its own (the experts of a mixture); 1 if in one.
    pub groups: usize,
}

impl Default for GpuOptions {
    /// Nothing fixed; scales row by row; one pair of weights a call.
    fn default() -> Self {
        Self { strategy: None, kernel: None, a_scale_layout: ScaleLayout::Linear, groups: 1 }
    }
}

dualgemm_formats::named! {
    /// Why a plan is what it is.
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum ChosenBy {
        /// The caller named it.
        Caller = "as asked for",
        /// It was measured on this machine.
        Tuned = "measured fastest here",
        /// It was measured on a card of this kind, and came with the program.
        Shipped = "measured fastest on a card of this kind",
        /// The cost model expects it to be the fastest.
        Model = "expected to be the fastest",
    }
}

/// How a problem is computed on a GPU.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GpuPlan {
    /// The problem; M is the most rows that a call may have.
    pub desc: DualGemmDesc,
    /// The device that it was made for.
    pub device: String,
    /// Name of the strategy.
    pub strategy: String,
    /// Name of its kernel.
    pub kernel: String,
    /// Why.
    pub chosen_by: ChosenBy,
    /// Order of the block scales of a quantized A in device memory.
    pub a_scale_layout: ScaleLayout,
    /// In about how many groups rows come that one launch takes; 1 if a call has one pair of weights.
    pub groups: usize,
}

impl GpuPlan {
    /// Chooses how to compute a problem on a device. Where no kernel takes rows in groups and none was asked for by name,
    /// the plan is for one pair of weights a call.
    ///
    /// # Errors
    /// If the description breaks a rule, a name is unknown, or nothing can take it; the reasons.
    pub fn new(desc: &DualGemmDesc, gpu: &Gpu, options: &GpuOptions) -> Result<Self, Error> {
        Self::choose(desc, dualgemm_device::Device::info(gpu), &Choices::of(gpu), options)
    }

    pub(crate) fn choose(
        desc: &DualGemmDesc,
        info: &DeviceInfo,
        choices: &Choices,
        options: &GpuOptions,
    ) -> Result<Self, Error> {
        desc.check()?;
        if desc.b.block_format().is_none() {
            let reason = format!("B is {}, which no kernel of a GPU multiplies; nvfp4 and mxfp4 are", desc.b);
            return Err(Error::Activations { reason });
        }
        let plan = |strategy: &str, kernel: String, chosen_by| Self {
            desc: *desc,
            device: info.name.clone(),
            strategy: strategy.into(),
            kernel,
            chosen_by,
            a_scale_layout: options.a_scale_layout,
            groups: options.groups.max(1),
        };
        let grouped = options.groups > 1;
        let wanted: Vec<&'static dyn Strategy> = match &options.strategy {
            Some(name) => vec![strategy(name)?],
            None => STRATEGIES.iter().copied().filter(|s| s.automatic()).collect(),
        };
        let mut fitting: Vec<(&'static dyn Strategy, Vec<String>)> = Vec::new();
        let mut refusals: Vec<(String, Vec<&str>)> = Vec::new();
        for s in wanted {
            match s.kernels(desc, options.groups, info) {
                Ok(kernels) => fitting.push((s, kernels)),
                Err(error) if options.strategy.is_some() => return Err(error),
                Err(error) => {
                    let reason = match error {
                        Error::Unsupported { reason, .. } => reason,
                        other => other.to_string(),
                    };
                    match refusals.iter_mut().find(|(known, _)| *known == reason) {
                        Some((_, names)) => names.push(s.name()),
                        None => refusals.push((reason, vec![s.name()])),
                    }
                }
            }
        }
        if let (Some(kernel), [(s, kernels)]) = (&options.kernel, fitting.as_slice()) {
            if !kernels.contains(kernel) {
                return Err(no_kernel(*s, kernel, kernels));
            }
            return Ok(plan(s.name(), kernel.clone(), ChosenBy::Caller));
        }
        let known = |strategy: &str, kernel: &str| {
            fitting.iter().any(|(s, kernels)| s.name() == strategy && kernels.iter().any(|k| k == kernel))
        };
        // What was measured had one pair of weights.
        let like_measured = !grouped && desc.op == Operation::GateUp;
        if let Some((choice, chosen_by)) = choices.best(desc, &known).filter(|_| like_measured) {
            return Ok(plan(&choice.strategy, choice.kernel.clone(), chosen_by));
        }
        let expected = fitting
            .iter()
            .flat_map(|(s, kernels)| kernels.iter().map(move |kernel| (s, kernel)))
            .map(|(s, kernel)| {
                let us = s.estimate_us(desc, options.groups.max(1), info, kernel);
                (us.unwrap_or(0.0), s, kernel)
            })
            .min_by(|a, b| a.0.total_cmp(&b.0));
        match expected {
            Some((_, s, kernel)) => Ok(plan(s.name(), kernel.clone(), ChosenBy::Model)),
            None if grouped => {
                Self::choose(desc, info, choices, &GpuOptions { groups: 1, ..options.clone() })
            }
            None => Err(match compute_type(desc) {
                // What all of them would say.
                Err(reason) => Error::Activations { reason },
                Ok(_) => {
                    let of =
                        |(reason, names): (String, Vec<&str>)| format!("{reason} ({})", names.join(", "));
                    let (problem, device) = (desc.to_string(), info.name.clone());
                    let reasons = refusals.into_iter().map(of).collect::<Vec<_>>().join("; ");
                    Error::NothingFits { problem, device, reasons }
                }
            }),
        }
    }

    /// The strategy.
    ///
    /// # Errors
    /// If a plan from elsewhere names one that this build does not have.
    pub fn strategy(&self) -> Result<&'static dyn Strategy, Error> {
        strategy(&self.strategy)
    }

    /// The order in which weights are read.
    pub fn weight_form(&self) -> Result<WeightForm, Error> {
        Ok(self.strategy()?.weight_form().of(self.desc.op))
    }

    /// Loads the kernels and takes the memory.
    ///
    /// # Errors
    /// If the machine lacks what the plan asks for, or its kernel does not take the problem.
    pub fn prepare(&self, gpu: &'static Gpu) -> Result<Box<dyn Prepared>, Error> {
        // A plan from elsewhere may be for another card, or of another build.
        self.desc.check()?;
        let (strategy, info) = (self.strategy()?, dualgemm_device::Device::info(gpu));
        let kernels = strategy.kernels(&self.desc, self.groups, info)?;
        if !kernels.contains(&self.kernel) {
            return Err(no_kernel(strategy, &self.kernel, &kernels));
        }
        strategy.prepare(gpu, self)
    }
}

fn no_kernel(strategy: &dyn Strategy, kernel: &str, there: &[String]) -> Error {
    Error::NoKernel { strategy: strategy.name(), found: kernel.into(), valid: there.join(", ") }
}

impl std::fmt::Display for GpuPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { desc, device, strategy, kernel, chosen_by, groups, .. } = self;
        let groups = if *groups > 1 { format!(" in about {groups} groups of rows") } else { String::new() };
        write!(f, "{desc}{groups}\n{strategy} by {kernel} on {device}, {chosen_by}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choices::Choice;
    use crate::model::tests::h100;
    use dualgemm_device::Arch;
    use dualgemm_formats::BlockFormat;
    use dualgemm_gemm::{AFormat, OutFormat, QuantizeA};

    fn card(major: u32, minor: u32) -> DeviceInfo {
        DeviceInfo { name: "card".into(), arch: Arch { major, minor }, ..h100() }
    }

    fn desc(m: usize, n: usize, k: usize) -> DualGemmDesc {
        DualGemmDesc { out: OutFormat::F16, ..DualGemmDesc::new(m, n, k, AFormat::F16, BlockFormat::Nvfp4) }
    }

    fn choose(desc: &DualGemmDesc, options: &GpuOptions) -> Result<GpuPlan, Error> {
        GpuPlan::choose(desc, &card(9, 0), &Choices::default(), options)
    }

    fn named(strategy: &str) -> GpuOptions {
        GpuOptions { strategy: Some(strategy.into()), ..GpuOptions::default() }
    }

    #[test]
    fn every_problem_gets_a_plan_that_its_strategy_knows() {
        let outs = [OutFormat::F32, OutFormat::F16, OutFormat::Bf16];
        for m in [1, 7, 64, 127, 129, 700, 5000] {
            for (n, k) in [(1, 16), (33, 464), (4096, 7168), (14336, 4096)] {
                for a in [AFormat::F16, AFormat::Bf16, AFormat::Nvfp4] {
                    for out in outs {
                        let desc = DualGemmDesc { a, out, ..desc(m, n, k) };
                        let plan = choose(&desc, &GpuOptions::default()).unwrap();
                        let kernels = plan.strategy().unwrap().kernels(&desc, 1, &card(9, 0)).unwrap();
                        assert!(kernels.contains(&plan.kernel), "{plan}");
                        assert_eq!(plan.chosen_by, ChosenBy::Model);
                    }
                }
            }
        }
    }

    #[test]
    fn few_rows_are_decoded_and_many_take_large_tiles() {
        let kernel = |m, n, k| choose(&desc(m, n, k), &GpuOptions::default()).unwrap().kernel;
        // One CTA for each multiprocessor.
        assert_eq!(kernel(1, 4096, 7168), "sm90a_warpwise_32x2_kg16_s2");
        assert_eq!(kernel(1, 14336, 4096), "sm90a_warpwise_112x2_kg4_s2");
        assert_eq!(kernel(8, 4096, 7168), "sm90a_warpwise_32x8_kg16_s2");
        assert_eq!(kernel(16, 4096, 7168), "sm90a_fused_64x16_b4_s10_kg4");
        assert!(kernel(20, 4096, 7168).contains("sm90a_fused_64x32_"));
        assert!(kernel(512, 4096, 7168).contains("128x256"));
        assert!(kernel(8192, 14336, 4096).contains("128x256"));
    }

    /// Measured on an H200: `benchmarks/record/h200-plans-2026-11-30.md`.
    #[test]
    fn shapes_that_no_table_has_get_the_kernel_that_was_measured_fastest() {
        let h200 = DeviceInfo { memory_bytes: 141 << 30, ..h100() };
        let kernel = |desc: DualGemmDesc, groups| {
            let desc = DualGemmDesc { a: AFormat::Bf16, out: OutFormat::Bf16, ..desc };
            let options = GpuOptions { groups, ..GpuOptions::default() };
            GpuPlan::choose(&desc, &h200, &Choices::default(), &options).unwrap()
        };
        let linear = |m, n, k| DualGemmDesc::linear(m, n, k, AFormat::Bf16, BlockFormat::Nvfp4);
        for (desc, groups, strategy, want) in [
            (desc(64, 2048, 7168), 1, "decode", "64x64_b3_s6_kg3_split2"),
            (desc(256, 3072, 4096), 1, "fused", "192x128_b1_s7_kg1_split2"),
            (desc(512, 14336, 4096), 1, "waves", "128x128_b2_s4_kg1"),
            (desc(512, 4096, 7168), 1, "fused", "128x256_b2_s3_kg1"),
            (desc(2048, 4096, 7168), 1, "persistent", "128x256_b1_s5_kg1"),
            (desc(4096, 4096, 7168), 1, "persistent", "128x256_b1_s5_kg1"),
            (linear(1, 4096, 14336), 1, "warpwise", "16x2_kg16_s2"),
            (linear(64, 7168, 4096), 1, "decode", "64x64_b3_s6_kg3"),
            (linear(64, 4096, 14336), 1, "decode", "64x64_b3_s6_kg3_split2"),
            (linear(128, 6144, 4096), 1, "fused", "128x128_b2_s4_kg1_split2"),
            (linear(1024, 7168, 4096), 1, "fused", "128x256_b2_s3_kg1"),
            (desc(16, 2880, 2880), 32, "warpwise", "96x2_kg5_s2"),
            (desc(256, 2880, 2880), 32, "fused", "128x16_b2_s8_kg1_2perSM"),
            (desc(1024, 2880, 2880), 32, "fused", "256x64_b4_s3_kg1"),
        ] {
            let plan = kernel(desc, groups);
            assert_eq!(plan.strategy, strategy, "{plan}");
            assert!(plan.kernel.ends_with(&format!("_{want}")), "{plan}; want {want}");
        }
    }

    #[test]
    fn measurements_come_before_expectations_and_only_for_their_problem() {
        let kernel = choose(&desc(64, 4096, 7168), &named("fused")).unwrap().kernel;
        let other = choose(&desc(64, 4096, 7168), &named("persistent")).unwrap().kernel;
        let choice =
            |m, strategy: &str, kernel: &String, us| Choice::of(&desc(m, 4096, 7168), strategy, kernel, us);
        let compared = ["fp8", "fused-epilogue"].map(|name| {
            let kernels = strategy(name).unwrap().kernels(&desc(64, 4096, 7168), 1, &card(9, 0)).unwrap();
            (name, kernels[kernels.len() - 1].clone())
        });
        let choices = Choices::tuned(vec![
            choice(64, compared[0].0, &compared[0].1, 0.5),
            choice(64, compared[1].0, &compared[1].1, 0.6),
            choice(64, "fused", &kernel, 20.0),
            choice(64, "persistent", &other, 10.0),
            choice(64, "fused", &"no such kernel".to_string(), 1.0),
        ]);
        let plan = |m, n, options: &GpuOptions| {
            GpuPlan::choose(&desc(m, n, 7168), &card(9, 0), &choices, options).unwrap()
        };
        let all = GpuOptions::default();
        assert_eq!(plan(64, 4096, &all).strategy, "persistent", "the fastest that is taken unasked");
        for (name, kernel) in compared {
            assert_eq!(plan(64, 4096, &named(name)).kernel, kernel);
        }
        assert_eq!(plan(64, 4096, &all).chosen_by, ChosenBy::Tuned);
        assert_eq!(plan(64, 4096, &named("fused")).kernel, kernel);
        assert_eq!(plan(50, 4096, &all).chosen_by, ChosenBy::Tuned, "fewer rows of the same tile");
        assert_eq!(plan(65, 4096, &all).chosen_by, ChosenBy::Model);
        assert_eq!(plan(64, 4104, &all).chosen_by, ChosenBy::Model);
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_reason() {
        let message =
            |desc: &DualGemmDesc, options: &GpuOptions| choose(desc, options).unwrap_err().to_string();
        let f32_a = DualGemmDesc { a: AFormat::F32, ..desc(1, 64, 64) };
        assert!(message(&f32_a, &GpuOptions::default()).contains("round it to f16 or bf16"));
        let quantized = DualGemmDesc { quantize_a: QuantizeA::Dynamic, ..f32_a };
        assert!(choose(&quantized, &GpuOptions::default()).is_ok());
        assert!(message(&desc(1, 64, 64), &named("fastest")).contains("baseline, "));
        assert!(message(&desc(500, 64, 64), &named("decode")).contains("M = 500"));
        let waves = message(&desc(64, 64, 64), &named("waves"));
        assert!(waves.contains("M = 64, N = 64: no tiles fill waves of 132 multiprocessors"), "{waves}");
        assert!(message(&desc(64, 65, 64), &named("waves")).contains("C is f16 of 65 features"));
        for name in ["waves", "stream-k"] {
            let grouped = message(&desc(64, 64, 64), &GpuOptions { groups: 2, ..named(name) });
            assert!(grouped.contains("2 groups of rows; it takes one pair of weights a call"), "{grouped}");
        }
        let options = GpuOptions { kernel: Some("x".into()), ..named("fused") };
        assert!(message(&desc(1, 64, 64), &options).starts_with("strategy fused has no kernel \"x\""));
        let old = GpuPlan::choose(&desc(1, 64, 64), &card(7, 5), &Choices::default(), &GpuOptions::default());
        let old = old.unwrap_err().to_string();
        assert!(old.contains("for sm_90a; this is card, sm_75") && old.contains("needs sm_80"), "{old}");
    }

    #[test]
    fn rows_in_groups_get_a_kernel_that_takes_them_or_one_for_each() {
        let options = |groups| GpuOptions { groups, ..GpuOptions::default() };
        let plan = |m, groups| choose(&desc(m, 1536, 2048), &options(groups)).unwrap();
        for (m, groups) in [(1, 2), (64, 64), (512, 8), (8192, 128)] {
            let plan = plan(m, groups);
            assert_eq!(plan.groups, groups, "{plan}");
            let few = m < groups;
            assert!(["fused", "persistent", "decode", "warpwise"].contains(&&*plan.strategy), "{plan}");
            assert!(plan.strategy == "warpwise" || !few, "{plan}");
            assert!(plan.to_string().contains(&format!("in about {groups} groups")), "{plan}");
        }
        assert!(plan(512, 128).kernel.contains("x8_"), "four rows each: {}", plan(512, 128));
        assert!(plan(8192, 8).kernel.contains("x256_"), "{}", plan(8192, 8));
        let blackwell = |arch: &DeviceInfo, m, groups| {
            let desc = DualGemmDesc { a: AFormat::Nvfp4, ..desc(m, 1536, 2048) };
            GpuPlan::choose(&desc, arch, &Choices::default(), &options(groups)).unwrap()
        };
        for arch in [card(10, 0), card(12, 0)] {
            for (m, groups) in [(1, 2), (64, 64), (512, 8), (8192, 128)] {
                let plan = blackwell(&arch, m, groups);
                assert_eq!((plan.groups, &*plan.strategy), (groups, "native"), "{plan}");
            }
        }
        let many = blackwell(&card(10, 0), 8192, 8).kernel;
        assert!(many.contains("tokens_") && many.contains("_g2_"), "{many}");
        let named = GpuOptions { groups: 8, ..named("stream-k") };
        let message = choose(&desc(64, 1536, 2048), &named).unwrap_err().to_string();
        assert!(message.starts_with("strategy stream-k cannot take this: "), "{message}");
        let old = GpuPlan::choose(&desc(64, 1536, 2048), &card(8, 0), &Choices::default(), &options(8));
        let old = old.unwrap();
        assert_eq!((old.groups, &*old.strategy), (8, "portable"));
    }

    #[test]
    fn cards_without_a_kernel_of_their_own_get_the_portable_one() {
        for arch in [card(8, 0), card(8, 9), card(12, 0)] {
            let plan = GpuPlan::choose(&desc(9, 64, 64), &arch, &Choices::default(), &GpuOptions::default());
            assert_eq!(plan.unwrap().strategy, "portable");
        }
    }

    /// A decoder meets a new number of tokens on almost every step. The fastest of ten runs counts: the machine does other work.
    #[test]
    fn a_thousand_different_shapes_are_planned_in_little_time() {
        let hundred = |first: usize| {
            let start = std::time::Instant::now();
            for m in first..first + 100 {
                choose(&desc(m, 4096, 7168), &GpuOptions::default()).unwrap();
            }
            start.elapsed().as_secs_f64() / 1e2
        };
        let each = (0..10).map(|i| hundred(1 + 100 * i)).fold(f64::INFINITY, f64::min);
        assert!(each < 2e-3, "{each} s each");
    }
}
