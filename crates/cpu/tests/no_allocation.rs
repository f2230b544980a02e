//! Products allocate nothing once planned. This test has a binary of its own, whose allocator counts the requests of the pool's
//! threads. The test harness has other threads, which may allocate at any time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use dualgemm_cpu::{CpuOptions, CpuPlan, Group, Isa, PackedGateUp, Tile, TileSink, Workspace};
use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{AFormat, AOperand, DualGemmDesc, GateUp, QuantizeA};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: hands every request on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    /// # Safety
    /// As [`GlobalAlloc::alloc`].
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(COUNTED.get().into(), Ordering::SeqCst);
        // SAFETY: `System.alloc` has the same contract: the layout is of at least one byte.
        unsafe { System.alloc(layout) }
    }

    /// # Safety
    /// As [`GlobalAlloc::dealloc`].
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the contract of `dealloc` says that `alloc` returned this pointer for this layout, and it came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Ignore;

impl TileSink for Ignore {
    fn store(&self, tile: &mut Tile<'_>) {
        std::hint::black_box(&tile.sums[0]);
    }
}

fn matrix(name: &str, rows: usize, k: usize) -> QuantizedMatrix<'static> {
    let (codes, scales) = (vec![0x5A; rows * k / 2], vec![0x38; rows * k / 16]);
    let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
    QuantizedMatrix::new(name, format, rows, k, codes, scales, layout, GlobalScale::ONE).unwrap()
}

#[test]
fn planned_products_allocate_nothing() {
    let (m, n, k) = (70, 40, 64);
    let packed = PackedGateUp::pack(&GateUp::new(matrix("gate", n, k), matrix("up", n, k))).unwrap();
    let groups = [
        Group { first_row: 0, rows: 1, weights: &packed },
        Group { first_row: 1, rows: 0, weights: &packed },
        Group { first_row: 1, rows: 69, weights: &packed },
    ];
    let floats = Matrix::new("a", m, k, (0..m * k).map(|i| i as f32).collect::<Vec<_>>()).unwrap();
    let floats = AOperand::Float(FloatMatrix::F32(floats));
    let cases = [
        (AOperand::Quantized(matrix("a", m, k)), QuantizeA::No),
        (floats.clone(), QuantizeA::No),
        (floats.clone(), QuantizeA::Static(0.5)),
        (floats, QuantizeA::Dynamic),
    ];
    // Inside the pool, as handing work to a pool from outside may grow its queue.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).start_handler(|_| COUNTED.set(true));
    let pool = pool.build().unwrap();
    // Each thread of a pool sets itself up when it first takes work from the other: the second does here, and then the first,
    // which has nothing else to do.
    let [first, second] = [0, 1].map(|_| Barrier::new(2));
    let back = || {
        first.wait();
        rayon::join(|| second.wait(), || second.wait());
    };
    pool.install(|| rayon::join(|| first.wait(), back));
    for (a, quantize_a) in cases {
        let desc =
            DualGemmDesc { quantize_a, ..DualGemmDesc::new(m, n, k, AFormat::of(&a), BlockFormat::Nvfp4) };
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            pool.install(|| {
                let plan = CpuPlan::new(
                    &desc,
                    CpuOptions { isa: Some(isa), threads: Some(2), ..CpuOptions::default() },
                )
                .unwrap();
                let mut workspace = Workspace::new(&plan, groups.len()).unwrap();
                let before = ALLOCATIONS.load(Ordering::SeqCst);
                for _ in 0..50 {
                    workspace.multiply(&a, &groups, |_| Ok(Ignore)).unwrap();
                }
                assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0, "{}", workspace.plan());
            });
        }
    }
    pool.install(|| {
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        drop(std::hint::black_box(vec![1u8; 3]));
        assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 1, "allocations are counted");
    });
}
