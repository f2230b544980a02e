//! Plans on Blackwell through the facade, on simulated cards with every check on: the strategy `native`, which no card
//! has run yet.

use dualgemm::device::{Device as _, DevicePtr, Stream};
use dualgemm::formats::ScaleLayout;
use dualgemm::gemm::{AFormat, Activation, DualGemmDesc, GateUp, OutFormat, OutScale, OutputMut, QuantizeA};
use dualgemm::{DeviceGateUp, DualGemm, GpuId, GpuOptions, Plan, SimArch, Target};
use half::f16;

use crate::expert;
use crate::gpu::{error, operand};

const CARDS: [GpuId; 2] = [GpuId::Sim(SimArch::Sm100a), GpuId::Sim(SimArch::Sm120a)];

fn plan(id: &GpuId, desc: &DualGemmDesc) -> Plan {
    DualGemm::plan(desc, &Target::Gpu(id.clone(), GpuOptions::default())).unwrap_or_else(|e| panic!("{e}"))
}

fn strategy(plan: &Plan) -> &str {
    let Plan::Gpu { plan, .. } = plan else { panic!("a GPU plan") };
    &plan.strategy
}

fn desc(m: usize, a: AFormat, out: OutFormat) -> DualGemmDesc {
    DualGemmDesc { out, ..DualGemmDesc::new(m, 80, 224, a, dualgemm::formats::BlockFormat::Nvfp4) }
}

#[test]
fn nvfp4_is_multiplied_as_it_is_for_few_rows_and_for_many_close() {
    for id in &CARDS {
        for m in [1, 9, 130] {
            let plan = plan(id, &desc(m, AFormat::Nvfp4, OutFormat::F16));
            assert_eq!(strategy(&plan), "native", "{id}");
            let found = error(&plan, &operand(m, 224, AFormat::Nvfp4), &expert(80, 224, 0));
            assert!(found < 4e-4, "{id}, {m} rows: {found:e}");
        }
    }
}

#[test]
fn floats_are_quantized_on_the_way_and_every_c_is_written_close() {
    let nvfp4 = |scale_layout| OutFormat::Nvfp4 { scale_layout, global_scale: OutScale::Static(0.02) };
    for id in &CARDS {
        for (a, quantize_a, out, bound) in [
            (AFormat::F32, QuantizeA::Static(0.01), OutFormat::F32, 1e-5),
            (AFormat::Bf16, QuantizeA::Dynamic, OutFormat::Bf16, 4e-3),
            (AFormat::F16, QuantizeA::Dynamic, nvfp4(ScaleLayout::Sf128x4), 0.2),
            (AFormat::Nvfp4, QuantizeA::No, nvfp4(ScaleLayout::Linear), 0.2),
        ] {
            let plan = plan(id, &DualGemmDesc { quantize_a, ..desc(5, a, out) });
            assert_eq!(strategy(&plan), "native", "{id}");
            let found = error(&plan, &operand(5, 224, a), &expert(80, 224, 0));
            assert!(found < bound, "{id}, A {a}: {found:e}");
        }
    }
}

/// Weights are widened to what A is.
#[test]
fn sm100_multiplies_halves_by_widened_weights_close() {
    for (a, out, bound) in [(AFormat::F16, OutFormat::F16, 4e-4), (AFormat::Bf16, OutFormat::F32, 1e-5)] {
        for m in [3, 70] {
            let plan = plan(&CARDS[0], &desc(m, a, out));
            assert_eq!(strategy(&plan), "native");
            let found = error(&plan, &operand(m, 224, a), &expert(80, 224, 0));
            assert!(found < bound, "A {a}, {m} rows: {found:e}");
        }
    }
}

#[test]
fn biases_alphas_and_activations_with_constants_count_close() {
    let bias: Vec<f32> = (0..80).map(|i| i as f32 / 64.0).collect();
    let weights = GateUp { gate_bias: Some(bias.into()), ..expert(80, 224, 1) };
    for id in &CARDS {
        let mut desc = desc(5, AFormat::Nvfp4, OutFormat::F32);
        desc.epilogue.activation = Activation::SWIGLU_OAI;
        (desc.epilogue.alpha_gate, desc.epilogue.alpha_up) = (0.5, -2.0);
        let found = error(&plan(id, &desc), &operand(5, 224, AFormat::Nvfp4), &weights);
        assert!(found < 1e-5, "{id}: {found:e}");
    }
}

/// Weights that are on the card give what those of the host give, in every order of their scales.
#[test]
fn weights_on_the_device_are_taken_exact() {
    let (id, weights, a) = (&CARDS[0], expert(80, 224, 0), operand(9, 224, AFormat::Nvfp4));
    let plan = plan(id, &desc(9, AFormat::Nvfp4, OutFormat::F16));
    let run = |packed: &_| {
        let mut c = vec![f16::NAN; 9 * 80];
        plan.runner(1).unwrap().run(&a, packed, OutputMut::F16(&mut c)).unwrap();
        c
    };
    let want = run(&plan.prepack(&weights).unwrap());
    let gpu = id.open().unwrap();
    let upload = |bytes: &[u8]| -> DevicePtr {
        let ptr = gpu.alloc(bytes.len()).unwrap();
        gpu.copy_to(ptr, bytes).unwrap();
        ptr
    };
    for layout in ScaleLayout::ALL {
        let halves = [&weights.gate, &weights.up].map(|half| half.clone().with_scale_layout(layout));
        let on_device = DeviceGateUp {
            n: 80,
            k: 224,
            codes: [0, 1].map(|i| upload(halves[i].codes())),
            scales: [0, 1].map(|i| upload(halves[i].scales())),
            layout,
            global_scales: [0, 1].map(|i| halves[i].global_scale().value()),
            bias: [None, None],
        };
        assert!(run(&plan.prepack_device(&on_device, Stream::Own).unwrap()) == want, "{layout}");
    }
}
