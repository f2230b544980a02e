//! A runner's runs on the processor allocate nothing. Allocations are counted by thread, since other tests go on beside.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use dualgemm::formats::BlockFormat;
use dualgemm::gemm::{
    AFormat, DualGemmDesc, Linear, Operation, OutFormat, OutScale, OutputMut, QuantizeA, RouterWeights,
    Routing,
};
use dualgemm::{AnyDesc, AnyPlan, AnyWeights, Error, MixtureDesc, Target};

use crate::mlp::{activations, desc, experts, mlp, nvfp4};
use crate::quantized;

/// Rows of the largest runs.
const ROWS: usize = 200;

/// N, K and features of Y.
const SHAPE: [usize; 3] = [32, 64, 48];

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: hands every request on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    /// # Safety
    /// As [`GlobalAlloc::alloc`].
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the layout is as the caller promises it to be: of more than no bytes.
        unsafe { System.alloc(layout) }
    }

    /// # Safety
    /// As [`GlobalAlloc::dealloc`].
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `alloc` took the memory from there with this layout, as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Weights of five experts, the shared one, or the first of them.
fn packed(plan: &AnyPlan) -> AnyWeights {
    let [n, k, h] = SHAPE;
    let first = mlp(n, k, h, 0);
    match plan {
        AnyPlan::Product(plan) if plan.desc().op == Operation::Linear => {
            AnyWeights::Product(plan.prepack(&Linear::new(quantized("w", n, k, 0.9))).unwrap())
        }
        AnyPlan::Product(plan) => AnyWeights::Product(plan.prepack(&first.gate_up).unwrap()),
        AnyPlan::Mlp(plan) => AnyWeights::Mlp(plan.prepack(&first).unwrap()),
        AnyPlan::Mixture(plan) => {
            let experts = experts().into_iter().map(Ok::<_, Error>);
            AnyWeights::Mixture(plan.prepack(experts, Some(&first)).unwrap())
        }
    }
}

#[test]
fn runs_of_a_runner_allocate_nothing() {
    let [n, k, _] = SHAPE;
    let gate_up = DualGemmDesc::new(ROWS, n, k, AFormat::F32, BlockFormat::Nvfp4);
    let linear = DualGemmDesc::linear(ROWS, n, k, AFormat::F32, BlockFormat::Nvfp4);
    let quantized = [gate_up, linear].map(|desc| DualGemmDesc { quantize_a: QuantizeA::Dynamic, ..desc });
    let mut descs = [gate_up, linear].into_iter().chain(quantized).map(AnyDesc::Product).collect::<Vec<_>>();
    for between in [OutFormat::Bf16, nvfp4(OutScale::Static(0.01)), nvfp4(OutScale::Dynamic)] {
        let mlp = desc(ROWS, SHAPE, AFormat::Bf16, between, OutFormat::F32);
        descs.push(AnyDesc::Mlp(mlp));
        for router in [RouterWeights::Output, RouterWeights::Input] {
            descs.push(AnyDesc::Mixture(MixtureDesc {
                mlp,
                experts: 5,
                top_k: 2,
                router,
                shared: Some(mlp),
            }));
        }
    }
    // Some go to expert 3, which is elsewhere.
    let ids: Vec<i32> = (0..2 * ROWS as i32).map(|choice| choice * 7 % 6 - 1).collect();
    let weights = vec![0.5; ids.len()];
    // One thread, the worker itself, whose allocations are those that are counted.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for desc in descs {
        let (first, width) = (desc.first(), desc.last().n);
        pool.install(|| {
            let plan = AnyPlan::new(&desc, &Target::default()).unwrap();
            let (packed, mut runner) = (packed(&plan), plan.runner().unwrap());
            let mut c = vec![0.0; ROWS * width];
            for rows in [1, 16, ROWS] {
                let a = activations(first.a, rows, k);
                let routing = Routing { ids: &ids[..2 * rows], weights: &weights[..2 * rows] };
                let routing = matches!(plan, AnyPlan::Mixture(_)).then_some(routing);
                let c = OutputMut::F32(&mut c[..rows * width]);
                let before = ALLOCATIONS.get();
                runner.run(&a, &packed, routing, (c, false)).unwrap();
                assert_eq!(ALLOCATIONS.get() - before, 0, "{rows} rows: {plan}");
            }
        });
    }
}
