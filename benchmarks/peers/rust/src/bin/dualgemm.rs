//! `dualgemm` as a worker, C in f32: A in f32 and quantized to NVFP4 in the call (W4A4), or in bf16 or f32 and used as
//! it is (W4A16).

use dualgemm::cpu::CpuOptions;
use dualgemm::formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm::gemm::{
    AFormat, AOperand, DualGemmDesc, GateUp, GatedMlp, Linear, MlpDesc, Operation, OutFormat, OutScale,
    OutputMut, QuantizeA, RouterWeights, Routing,
};
use dualgemm::{DualGemm, Error, MixtureDesc, MixturePlan, MlpPlan, Target};
use dualgemm_peers::Job;
use half::bf16;

fn main() -> Result<(), Error> {
    let job = Job::from_args();
    // This thread is one of the pool, as it is of ggml's.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(job.threads).use_current_thread();
    pool.build_global().expect("the first pool");
    let (m, n, k) = (job.m, job.n, job.k);
    let (a_format, quantize_a) = match job.peer.as_str() {
        "dualgemm-w4a4" => (AFormat::F32, QuantizeA::Dynamic),
        "dualgemm-w4a16-bf16" => (AFormat::Bf16, QuantizeA::No),
        "dualgemm-w4a16-f32" => (AFormat::F32, QuantizeA::No),
        other => panic!("no kernel is called {other}"),
    };
    let matrix = |name: &'static str, expert, n, k| {
        let part = |kind, len| job.part(&format!("{name}.{kind}"), expert, len);
        let (codes, scales) = (part("codes", n * k / 2), part("scales", n * k / 16));
        let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
        QuantizedMatrix::new(name, format, n, k, codes, scales, layout, GlobalScale::ONE)
    };
    let gate_and_up =
        |expert| Ok::<_, Error>(GateUp::new(matrix("b1", expert, n, k)?, matrix("b2", expert, n, k)?));
    let gated_mlp = |expert| {
        let down = Linear::new(matrix("b3", expert, k, n)?);
        Ok::<_, Error>(GatedMlp { gate_up: gate_and_up(expert)?, down })
    };
    let gate_up = DualGemmDesc { quantize_a, ..DualGemmDesc::new(m, n, k, a_format, BlockFormat::Nvfp4) };
    let target = Target::Cpu(CpuOptions { threads: Some(job.threads), ..CpuOptions::default() });
    // Codes and block scales.
    let weights_bytes = |matrices: usize| job.experts * matrices * n * k * 9 / 16;
    let a = AOperand::Float(match a_format {
        AFormat::Bf16 => {
            let a: Vec<bf16> = job.a().into_iter().map(bf16::from_f32).collect();
            FloatMatrix::Bf16(Matrix::new("a", m, k, a)?)
        }
        _ => FloatMatrix::F32(Matrix::new("a", m, k, job.a())?),
    });
    if matches!(job.op.as_str(), "mlp" | "moe") {
        // What is between has the format of A as it is multiplied.
        let between = match (quantize_a, a_format) {
            (QuantizeA::Dynamic, _) => {
                OutFormat::Nvfp4 { scale_layout: ScaleLayout::Linear, global_scale: OutScale::Dynamic }
            }
            (_, AFormat::Bf16) => OutFormat::Bf16,
            _ => OutFormat::F32,
        };
        let gate_up = DualGemmDesc { out: between, ..gate_up };
        let mlp = MlpDesc::new(gate_up, k, BlockFormat::Nvfp4, OutFormat::F32);
        if job.op == "mlp" {
            let plan = MlpPlan::new(&mlp, &target)?;
            let sets = vec![plan.prepack(&gated_mlp(0)?)?; job.sets(weights_bytes(3))];
            let mut runner = plan.runner(1)?;
            job.serve(weights_bytes(3), |set, c| {
                runner.run(&a, &sets[set], OutputMut::F32(c)).expect("operands fit the plan");
            });
            return Ok(());
        }
        let (experts, top_k, router) = (job.experts, job.top_k, RouterWeights::Output);
        let plan = MixturePlan::new(&MixtureDesc { mlp, experts, top_k, router, shared: None }, &target)?;
        let packed = plan.prepack((0..experts).map(|expert| gated_mlp(expert).map(Some)), None)?;
        let sets = vec![packed; job.sets(weights_bytes(3))];
        let ids = job.numbers(&format!("{m}/ids.i32"), m * top_k, i32::from_le_bytes);
        let weights = job.numbers(&format!("{m}/router.f32"), m * top_k, f32::from_le_bytes);
        let routing = Routing { ids: &ids, weights: &weights };
        let mut runner = plan.runner()?;
        job.serve(weights_bytes(3), |set, c| {
            runner.run(&a, routing, &sets[set], OutputMut::F32(c), false).expect("operands fit the plan");
        });
        return Ok(());
    }
    let linear = job.op == "linear";
    let op = if linear { Operation::Linear } else { Operation::GateUp };
    let plan = DualGemm::plan(&DualGemmDesc { op, ..gate_up }, &target)?;
    let packed = match linear {
        true => plan.prepack(&Linear::new(matrix("b1", 0, n, k)?))?,
        false => plan.prepack(&gate_and_up(0)?)?,
    };
    let bytes = weights_bytes(op.matrices());
    let sets = vec![packed; job.sets(bytes)];
    let mut runner = plan.runner(1)?;
    job.serve(bytes, |set, c| {
        runner.run(&a, &sets[set], OutputMut::F32(c)).expect("operands fit the plan");
    });
    Ok(())
}
