//! A runner's runs on the processor allocate nothing. Allocations are counted by thread, since other tests go on beside.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use dualgemm::formats::BlockFormat;
use dualgemm::gemm::{AFormat, AOperand, DualGemmDesc, OutputMut, QuantizeA};
use dualgemm::{DualGemm, Target};

use crate::{expert, floats};

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

#[test]
fn runs_of_a_runner_allocate_nothing() {
    let (m, n, k) = (5, 32, 64);
    let (weights, a) = (expert(n, k, 0), AOperand::Float(floats(m, k, 0.7)));
    // One thread, the worker itself, whose allocations are those that are counted.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for quantize_a in [QuantizeA::No, QuantizeA::Dynamic] {
        let desc =
            DualGemmDesc { quantize_a, ..DualGemmDesc::new(m, n, k, AFormat::F32, BlockFormat::Nvfp4) };
        let count = pool.install(|| {
            let plan = DualGemm::plan(&desc, &Target::default()).unwrap();
            let packed = plan.prepack(&weights).unwrap();
            let mut runner = plan.runner(1).unwrap();
            let mut c = vec![0.0; m * n];
            let before = ALLOCATIONS.get();
            runner.run(&a, &packed, OutputMut::F32(&mut c)).unwrap();
            ALLOCATIONS.get() - before
        });
        assert_eq!(count, 0, "{quantize_a:?}");
    }
}
