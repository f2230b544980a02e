//! Linear layers, whole MLPs and mixtures on a simulated H100, where what is between the products stays.

use dualgemm::device::{DevicePtr, Stream};
use dualgemm::strategies::Buffer;
use dualgemm::{
    AnyDesc, AnyPlan, AnyWeights, DeviceA, DeviceC, DeviceCall, DeviceRouting, GpuId, GpuOptions, Launchers,
    SimArch,
};

use super::*;
use crate::on_device::{self, a_bytes};

fn target(strategy: Option<&str>) -> Target {
    let options = GpuOptions { strategy: strategy.map(Into::into), ..GpuOptions::default() };
    Target::Gpu(GpuId::Sim(SimArch::Sm90a), options)
}

fn bytes<T: Copy, const N: usize>(values: &[T], bytes_of: fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| bytes_of(value)).collect()
}

/// The floats of a C in f32.
fn read(c: &Buffer) -> Vec<f32> {
    on_device::read(c).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// A call on A in f16 and C in f32.
fn call(m: usize, k: usize, a: DevicePtr, c: DevicePtr) -> DeviceCall {
    DeviceCall { m, a: DeviceA::Float { values: a, pitch: 2 * k }, c: DeviceC::Float(c) }
}

fn refusal<T>(result: Result<T, Error>) -> String {
    result.map(|_| ()).unwrap_err().to_string()
}

/// Tiles of 64 tokens read an nvfp4 A that the kernel before leaves in blocks of columns; of fewer rows than planned, too.
#[test]
fn expanded_blocks_of_columns_are_right_close() {
    let kernel = Some("sm90a_fused_64x64_b3_s6_kg3".into());
    let options = GpuOptions { strategy: Some("decode".into()), kernel, ..GpuOptions::default() };
    let desc = DualGemmDesc::new(64, 40, 448, AFormat::Nvfp4, BlockFormat::Nvfp4);
    let plan = DualGemm::plan(&desc, &Target::Gpu(GpuId::Sim(SimArch::Sm90a), options)).unwrap();
    for m in [64, 37] {
        let found = crate::gpu::error(&plan, &activations(AFormat::Nvfp4, m, 448), &expert(40, 448, 0));
        assert!(found < 1e-5, "{m} rows: {found:e}");
    }
}

#[test]
fn strategies_without_linear_layers_say_so() {
    for other in ["waves", "plain", "baseline"] {
        let desc = DualGemmDesc::linear(1, 136, 224, AFormat::F16, BlockFormat::Nvfp4);
        let message = refusal(DualGemm::plan(&desc, &target(Some(other))));
        assert!(message.ends_with("a linear layer; it computes gate and up"), "{message}");
    }
}

#[test]
fn weights_packed_for_the_other_operation_are_refused() {
    let desc = DualGemmDesc::linear(1, 64, 64, AFormat::F16, BlockFormat::Nvfp4);
    let linear = DualGemm::plan(&desc, &target(None)).unwrap();
    let pair = DualGemm::plan(&DualGemmDesc { op: Default::default(), ..desc }, &target(None)).unwrap();
    let packed = pair.prepack(&expert(64, 64, 1)).unwrap();
    let message = refusal(linear.run_to_vec(&activations(AFormat::F16, 1, 64), &packed));
    assert!(message.contains("asks for packed for a linear layer"), "{message}");
    assert!(linear.prepack(&expert(64, 64, 1)).is_err());
}

#[test]
fn mlps_are_within_the_bounds_of_f64_whatever_is_between() {
    let ways = [
        (AFormat::Bf16, OutFormat::Bf16),
        (AFormat::F16, OutFormat::F16),
        (AFormat::F16, nvfp4(OutScale::Static(0.01))),
        (AFormat::Nvfp4, nvfp4(OutScale::Static(0.01))),
    ];
    for (a_format, between) in ways {
        let m = 5;
        let (plan, a, c) = check_mlp(&target(None), (m, [80, 96, 48]), (a_format, QuantizeA::No), between);
        if a_format != AFormat::F16 {
            continue;
        }
        let gpu = GpuId::Sim(SimArch::Sm90a).open().unwrap();
        let (a, to) = (Buffer::of(gpu, &a_bytes(&a).0).unwrap(), Buffer::zeroed(gpu, m * 48 * 4).unwrap());
        let call = call(m, 96, a.ptr(), to.ptr());
        let (packed, runner) = (plan.prepack(&mlp(80, 96, 48, 1)).unwrap(), plan.runner(1).unwrap());
        runner.warm(&packed).unwrap();
        for _ in 0..2 {
            // SAFETY: the buffers have the sizes of the call, and live until they are read, which waits.
            unsafe { runner.run_device(&call, &packed, Stream::Own) }.unwrap();
        }
        assert_eq!(read(&to), c, "{plan}");
    }
    for (between, says) in [
        (nvfp4(OutScale::Dynamic), "with a dynamic scale; on a GPU a static scale, or f16 or bf16 is"),
        (
            OutFormat::F32,
            "C of gate and up is f32; on a GPU f16, bf16 or nvfp4 (on the command line: --between)",
        ),
    ] {
        let desc = desc(1, [32, 32, 32], AFormat::F16, between, OutFormat::F32);
        let message = refusal(MlpPlan::new(&desc, &target(None)));
        assert!(message.contains(says), "{message}");
    }
}

/// Tokens whose experts are not there, experts without tokens, calls of fewer tokens than planned, twice.
#[test]
fn mixtures_are_within_the_bounds_of_f64() {
    let gpu = GpuId::Sim(SimArch::Sm90a).open().unwrap();
    let all: Vec<GatedMlp<'_>> = (0..5).map(|e| mlp(32, 64, 48, e)).collect();
    let experts: Vec<Option<GatedMlp<'_>>> = all.iter().cloned().map(Some).collect();
    // Expert 3 gets no row; -1 and 7 are skipped, which the reference takes for experts that are elsewhere.
    let ids: [i32; 14] = [1, 0, 2, 1, -1, 0, 4, 2, 0, 2, 1, 7, 2, 0];
    let seen = ids.map(|id| if id == 7 { -1 } else { id });
    let weights = weights();
    let (half, brain, output, input) =
        (AFormat::F16, AFormat::Bf16, RouterWeights::Output, RouterWeights::Input);
    // Few choices go through the kernel for few tokens as they are, unless the router's weights multiply A; through others sorted.
    for (format, router, between, add, strategy) in [
        (half, output, OutFormat::F16, false, "decode"),
        (half, output, OutFormat::F16, true, "decode"),
        (half, output, OutFormat::F16, false, "warpwise"),
        (half, output, OutFormat::F16, true, "warpwise"),
        (brain, output, OutFormat::Bf16, false, "warpwise"),
        (half, output, nvfp4(OutScale::Static(0.01)), false, "decode"),
        (half, input, OutFormat::F16, true, "decode"),
        (brain, input, OutFormat::Bf16, false, "fused"),
        (brain, input, OutFormat::Bf16, false, "warpwise"),
    ] {
        let desc = mixture(9, format, between, OutFormat::F32, router);
        let plan = MixturePlan::new(&desc, &target(Some(strategy))).unwrap();
        let (packed, mut runner) = (self::packed(&plan, &experts), plan.runner().unwrap());
        runner.warm(&packed).unwrap();
        for tokens in [7, 3] {
            let choices = 2 * tokens;
            let a = activations(format, tokens, 64);
            let on_device = [
                a_bytes(&a).0,
                bytes(&ids[..choices], i32::to_le_bytes),
                bytes(&weights[..choices], f32::to_le_bytes),
                bytes(&vec![100.0; tokens * 48], f32::to_le_bytes),
            ]
            .map(|bytes| Buffer::of(gpu, &bytes).unwrap());
            let [a_at, ids_at, weights_at, c_at] = on_device.each_ref().map(Buffer::ptr);
            let call = call(tokens, 64, a_at, c_at);
            let call = dualgemm::MixtureCall { call, ids: ids_at, weights: weights_at, add };
            // SAFETY: the buffers have the sizes of the call, and live until C is read, which waits.
            unsafe { runner.run_device(&call, &packed, Stream::Own) }.unwrap();
            let offset = if add { 100.0 } else { 0.0 };
            let found: Vec<f32> = read(&on_device[3]).into_iter().map(|value| value - offset).collect();
            let routing = Routing { ids: &seen[..choices], weights: &weights[..choices] };
            let mut want = mixture_reference(&desc.mlp, router, &a, routing, &experts);
            // What a call on the host's operands gives, where it may be asked for; 7 is no expert there.
            let routing_on_host = Routing { ids: &seen[..choices], ..routing };
            let mut copied = vec![0.0; tokens * 48];
            runner.run(&a, routing_on_host, &packed, OutputMut::F32(&mut copied), false).unwrap();
            assert!(add || copied == found, "{} {between}", plan.mlp);
            // What is added to rounds once more.
            want.iter_mut().for_each(|want| want.error += f64::from(offset) * 1e-6);
            assert_within(&found, &want, &format!("{} {router:?} {between} {add}", plan.mlp));
        }
    }
}

/// By address, on a stream, through the runners that weights of one shape share: as with operands of the host, twice.
#[test]
fn operations_in_device_memory_equal_those_on_the_hosts_operands_exact() {
    let gpu = GpuId::Sim(SimArch::Sm90a).open().unwrap();
    let (n, k, h, m) = (32, 64, 48, 3);
    let ids = [1, 0, 2, -1, 4, 2];
    let weights: Vec<f32> = weights()[..6].to_vec();
    let routing = Routing { ids: &ids, weights: &weights };
    let mlp_desc = |m| desc(m, [n, k, h], AFormat::F16, OutFormat::F16, OutFormat::F32);
    let linear = move |m| AnyDesc::Product(DualGemmDesc::linear(m, n, k, AFormat::F16, BlockFormat::Nvfp4));
    let whole = move |m| AnyDesc::Mlp(mlp_desc(m));
    let mixed = move |m| {
        AnyDesc::Mixture(mixture(m, AFormat::F16, OutFormat::F16, OutFormat::F32, RouterWeights::Output))
    };
    let operations: [(&dyn Fn(usize) -> AnyDesc, usize); 3] = [(&linear, n), (&whole, h), (&mixed, h)];
    for (at, (describe, features)) in operations.into_iter().enumerate() {
        let routing = (at == 2).then_some(routing);
        for layer in 0..2 {
            let plan = AnyPlan::new(&describe(m), &target(None)).unwrap();
            let packed = match &plan {
                AnyPlan::Product(plan) => {
                    AnyWeights::Product(plan.prepack(&mlp(k, 32, n, layer).down).unwrap())
                }
                AnyPlan::Mlp(plan) => AnyWeights::Mlp(plan.prepack(&mlp(n, k, h, layer)).unwrap()),
                AnyPlan::Mixture(plan) => {
                    let all = (0..5).map(|e| Ok::<_, Error>(Some(mlp(n, k, h, layer + e))));
                    AnyWeights::Mixture(plan.prepack(all, None).unwrap())
                }
            };
            let a = activations(AFormat::F16, m, k);
            let mut c = vec![0.0; m * features];
            let to = (OutputMut::F32(&mut c), false);
            plan.runner().unwrap().run(&a, &packed, routing, to).unwrap();
            let lists = (bytes(&ids, i32::to_le_bytes), bytes(&weights, f32::to_le_bytes));
            let on_device = [a_bytes(&a).0, lists.0, lists.1, vec![0; 4 * c.len()]]
                .map(|bytes| Buffer::of(gpu, &bytes).unwrap());
            let [values, ids, weights, to] = on_device.each_ref().map(Buffer::ptr);
            let call = call(m, k, values, to);
            let launchers = Launchers::default();
            let lists = routing.map(|_| DeviceRouting { ids, weights, add: false });
            let run = |routing| {
                let layout = dualgemm::formats::ScaleLayout::Linear;
                // SAFETY: the buffers have the sizes of the call, and live until C is read, which waits.
                unsafe { launchers.run((describe, layout), &target(None), &packed, (&call, routing), 0) }
            };
            for _ in 0..2 {
                run(lists).unwrap();
            }
            assert_eq!(read(&on_device[3]), c, "{plan}");
            // Only a mixture has a router.
            let other = lists.xor(Some(DeviceRouting { ids, weights, add: false }));
            let message = refusal(run(other));
            assert!(message.starts_with("the weights is those of "), "{message}");
        }
    }
}

#[test]
fn mixtures_that_a_gpu_does_not_take_are_refused_by_name() {
    let refused = |desc: &MixtureDesc| refusal(MixturePlan::new(desc, &target(None)));
    let desc = mixture(2, AFormat::F16, OutFormat::F16, OutFormat::F32, RouterWeights::Output);
    let quantized = mixture(2, AFormat::Nvfp4, OutFormat::F16, OutFormat::F32, RouterWeights::Output);
    assert!(refused(&quantized).starts_with("A of a mixture is nvfp4; on a GPU f16 or bf16 is needed"));
    let plan = MixturePlan::new(&desc, &target(None)).unwrap();
    let message = refusal(plan.prepack(experts().into_iter().map(Ok::<_, Error>), None));
    assert!(message.starts_with("the list of experts is without number 3; on a GPU"), "{message}");
    let on_cpu = MixturePlan::new(&desc, &Target::default()).unwrap();
    let (packed, mut runner) = (self::packed(&on_cpu, &experts()), on_cpu.runner().unwrap());
    runner.warm(&packed).unwrap();
    let mut gpu = plan.runner().unwrap();
    let (a, routing) = (activations(AFormat::F16, 2, 64), Routing { ids: &[0, 1, 2, 0], weights: &[1.0; 4] });
    let mut c = [0.0; 96];
    let message = refusal(gpu.run(&a, routing, &packed, OutputMut::F32(&mut c), false));
    assert_eq!(message, "these weights were packed for the processor; the plan is for a GPU");
    let all: Vec<_> = (0..5).map(|e| Ok::<_, Error>(Some(mlp(32, 64, 48, e)))).collect();
    let packed = plan.prepack(all, None).unwrap();
    let message = refusal(gpu.run(&a, routing, &packed, OutputMut::F32(&mut c), true));
    assert!(message.starts_with("C of a mixture is added to in the host's memory"), "{message}");
    let message = refusal(runner.run(&a, routing, &packed, OutputMut::F32(&mut c), false));
    assert!(message.starts_with("these weights were packed for a GPU"), "{message}");
}

#[test]
fn a_shared_expert_is_added_in_f32_on_a_gpu_too() {
    let all: Vec<Option<GatedMlp<'_>>> = (0..5).map(|e| Some(mlp(32, 64, 48, e))).collect();
    check_shared(&target(None), OutFormat::F16, OutFormat::Bf16, &all);
}
