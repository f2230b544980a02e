//! `dualgemm` as a worker, C in f32: A in f32 and quantized to NVFP4 in the call (W4A4), or in bf16 or f32 and used as
//! it is (W4A16).

use dualgemm::cpu::CpuOptions;
use dualgemm::formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm::gemm::{AFormat, AOperand, DualGemmDesc, GateUp, OutputMut, QuantizeA};
use dualgemm::{DualGemm, Error, Target};
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
    let matrix = |name| {
        let (codes, scales) = (job.bytes(&format!("{name}.codes")), job.bytes(&format!("{name}.scales")));
        let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
        QuantizedMatrix::new(name, format, n, k, codes, scales, layout, GlobalScale::ONE)
    };
    let desc = DualGemmDesc { quantize_a, ..DualGemmDesc::new(m, n, k, a_format, BlockFormat::Nvfp4) };
    let options = CpuOptions { threads: Some(job.threads), ..CpuOptions::default() };
    let plan = DualGemm::plan(&desc, &Target::Cpu(options))?;
    let packed = plan.prepack(&GateUp::new(matrix("b1")?, matrix("b2")?))?;
    // Codes and block scales.
    let weights_bytes = 2 * n * k * 9 / 16;
    let sets = vec![packed; job.sets(weights_bytes)];
    let a = AOperand::Float(match a_format {
        AFormat::Bf16 => {
            let a: Vec<bf16> = job.a().into_iter().map(bf16::from_f32).collect();
            FloatMatrix::Bf16(Matrix::new("a", m, k, a)?)
        }
        _ => FloatMatrix::F32(Matrix::new("a", m, k, job.a())?),
    });
    let mut runner = plan.runner(1)?;
    job.serve(weights_bytes, |set, c| {
        runner.run(&a, &sets[set], OutputMut::F32(c)).expect("operands fit the plan");
    });
    Ok(())
}
