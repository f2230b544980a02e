//! The plans of `products.txt`, which says how they are written.

use dualgemm::formats::{BlockFormat, FloatType, ScaleLayout};
use dualgemm::gemm::{
    AFormat, AOperand, Activation, DualGemmDesc, GateUp, OutFormat, OutScale, QuantizeA, bounded_reference,
};
use dualgemm::{DualGemm, GpuId, GpuOptions, Plan, Target};
use dualgemm_cases::{expanded, fits, named, paragraphs, parse};

use crate::blackwell::{mxfp4, mxfp4_pair};
use crate::gpu::{error, operand};
use crate::{expert, experts, mlp};

fn a_format(name: &str) -> AFormat {
    named(AFormat::ALL, name)
}

fn out_format(text: &str) -> OutFormat {
    match text.split(':').collect::<Vec<_>>()[..] {
        ["nvfp4", order, scale] => {
            let global_scale =
                if scale == "dynamic" { OutScale::Dynamic } else { OutScale::Static(parse(scale)) };
            OutFormat::Nvfp4 { scale_layout: named(ScaleLayout::ALL, order), global_scale }
        }
        ["f32"] => OutFormat::F32,
        ["f16"] => OutFormat::F16,
        ["bf16"] => OutFormat::Bf16,
        _ => panic!("`{text}`"),
    }
}

/// A card, its strategy, what is multiplied there, and how it is compared.
struct Case<'l> {
    card: &'l str,
    options: GpuOptions,
    desc: DualGemmDesc,
    words: Vec<&'l str>,
    bound: &'l str,
    by: Option<&'l str>,
}

impl<'l> Case<'l> {
    fn new(target: &'l str, operands: &'l str, check: &'l str) -> Self {
        let (card, strategy) =
            target.split_once(' ').map_or((target, None), |(card, name)| (card, Some(name)));
        let [a, "to", out, ref words @ ..] = operands.split(' ').collect::<Vec<_>>()[..] else {
            panic!("`{operands}`")
        };
        let mut options = GpuOptions { strategy: strategy.map(Into::into), ..GpuOptions::default() };
        let mut desc = DualGemmDesc::new(1, 1, 16, a_format(a), BlockFormat::Nvfp4);
        desc.out = out_format(out);
        for word in words {
            match word.split_once('=').unwrap_or((word, "")) {
                ("quantize", "dynamic") => desc.quantize_a = QuantizeA::Dynamic,
                ("quantize", scale) => desc.quantize_a = QuantizeA::Static(parse(scale)),
                ("weights", "mxfp4") => desc.b = AFormat::Mxfp4,
                ("alphas", "") => (desc.epilogue.alpha_gate, desc.epilogue.alpha_up) = (0.5, -2.0),
                ("swigluoai", "") => desc.epilogue.activation = Activation::SWIGLU_OAI,
                ("groups", number) => options.groups = parse(number),
                ("a-scales", order) => options.a_scale_layout = named(ScaleLayout::ALL, order),
                ("gate-bias" | "up-bias" | "biased" | "linear" | "as-rows" | "mlp", "") | ("planned", _) => {}
                _ => panic!("`{word}`"),
            }
        }
        let (bound, by) = check.split_once(" by ").map_or((check, None), |(bound, by)| (bound, Some(by)));
        Self { card, options, desc, words: words.to_vec(), bound, by }
    }

    fn has(&self, word: &str) -> bool {
        self.words.contains(&word)
    }

    fn target(&self, options: GpuOptions) -> Target {
        match self.card {
            "cpu" => Target::default(),
            card => Target::Gpu(parse(&format!("sim:{card}")), options),
        }
    }

    fn plan(&self, desc: &DualGemmDesc) -> Plan {
        let plan = DualGemm::plan(desc, &self.target(self.options.clone())).unwrap_or_else(|e| panic!("{e}"));
        if let (Some(by), Plan::Gpu { plan, .. }) = (self.by, &plan) {
            assert!(fits(&plan.strategy, by), "{plan:?}");
        }
        plan
    }

    fn check(&self, shape: &str, tables: &[Vec<u32>]) {
        let sizes: Vec<usize> = shape.split('x').map(parse).collect();
        let (m, n, k) = (sizes[0], sizes[1], sizes[2]);
        let planned = self.words.iter().find_map(|word| word.strip_prefix("planned=")).map_or(m, parse);
        let desc = DualGemmDesc { m: planned, n, k, ..self.desc };
        if self.options.groups > 1 {
            let id: GpuId = parse(&format!("sim:{}", self.card));
            let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
            let options = self.options.clone();
            experts::check(&id, (&desc, options), self.has("biased"), &tables, parse(self.bound));
        } else if self.has("mlp") {
            let a = (desc.a, desc.quantize_a);
            mlp::check_mlp(&self.target(self.options.clone()), (m, [n, k, sizes[3]]), a, desc.out);
        } else if self.has("linear") {
            let desc = DualGemmDesc { out: desc.out, ..DualGemmDesc::linear(m, n, k, desc.a, desc.b) };
            self.check_linear(&desc);
        } else {
            self.check_gated(&desc, m);
        }
    }

    fn check_linear(&self, desc: &DualGemmDesc) {
        let &DualGemmDesc { m, n, k, .. } = desc;
        let (plan, layer) = (self.plan(desc), mlp::mlp(k, 32, n, 2).down);
        let a = mlp::activations(desc.a, m, k);
        let want = bounded_reference(&desc.epilogue, &a, 0..m, &layer);
        let mut packed = vec![plan.prepack(&layer).unwrap()];
        if self.has("as-rows") {
            let native = GpuOptions { strategy: Some("native".into()), ..GpuOptions::default() };
            let rows =
                DualGemm::plan(&DualGemmDesc { a: AFormat::Nvfp4, ..*desc }, &self.target(native)).unwrap();
            packed.push(rows.prepack(&layer).unwrap());
        }
        for packed in packed {
            mlp::assert_within(&plan.run_to_vec(&a, &packed).unwrap(), &want, &plan.to_string());
        }
    }

    fn check_gated(&self, desc: &DualGemmDesc, m: usize) {
        let &DualGemmDesc { n, k, .. } = desc;
        let bias = |word| self.has(word).then(|| (0..n).map(|i| i as f32 / 64.0).collect::<Vec<_>>().into());
        let (gate_bias, up_bias) = (bias("gate-bias"), bias("up-bias"));
        let number = usize::from(gate_bias.is_some() || up_bias.is_some());
        let pair = match desc.b {
            AFormat::Mxfp4 => mxfp4_pair(n, k, number),
            _ => expert(n, k, number),
        };
        let a = match desc.a {
            AFormat::Mxfp4 => AOperand::Quantized(mxfp4("a", m, k, 0.37)),
            format => operand(m, k, format),
        };
        let plan = self.plan(desc);
        let found = error(&plan, &a, &GateUp { gate_bias, up_bias, ..pair });
        assert!(found < parse(self.bound), "{plan}: {found:e}");
    }
}

#[test]
fn products_are_right_close() {
    assert_eq!(FloatType::ALL.len(), 3, "a new float type needs a row there");
    let count = paragraphs(("products.txt", include_str!("products.txt")), &mut Vec::new(), &mut |lines| {
        for (at, line) in lines.iter().flat_map(|(at, line)| expanded(line).into_iter().map(move |l| (at, l)))
        {
            println!("{at}: {line}");
            let [target, operands, shapes, check] = line.split(" | ").collect::<Vec<_>>()[..] else {
                panic!("four parts")
            };
            let (case, shapes) = (Case::new(target, operands, check), shapes.split(' ').collect::<Vec<_>>());
            match case.options.groups {
                groups if groups > 1 => {
                    let table = |text: &&str| text.split(',').map(parse).collect();
                    case.check(shapes[0], &shapes[1..].iter().map(table).collect::<Vec<_>>());
                }
                _ => shapes.iter().for_each(|shape| case.check(shape, &[])),
            }
        }
    });
    assert!(count > 5, "{count} paragraphs");
}
