//! Products allocate nothing once planned. This test has a binary of its own, whose allocator counts the requests of the pool's
//! threads. The test harness has other threads, which may allocate at any time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use dualgemm_cpu::{CpuOptions, CpuPlan, Group, Isa, PackedGateUp, Tile, TileSink, Workspace};
use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{AFormat, AOperand, DualGemmDesc, GateUp, Linear, QuantizeA};

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

fn matrix(name: &'static str, rows: usize, k: usize) -> QuantizedMatrix<'static> {
    let (codes, scales) = (vec![0x5A; rows * k / 2], vec![0x38; rows * k / 16]);
    let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
    QuantizedMatrix::new(name, format, rows, k, codes, scales, layout, GlobalScale::ONE).unwrap()
}

#[test]
fn planned_products_allocate_nothing() {
    const ROWS: usize = 200;
    let (n, k) = (40, 64);
    let pair = PackedGateUp::pack(&GateUp::new(matrix("gate", n, k), matrix("up", n, k))).unwrap();
    let one = PackedGateUp::pack(&Linear::new(matrix("w", n, k))).unwrap();
    let floats =
        |rows| Matrix::new("a", rows, k, (0..rows * k).map(|i| i as f32).collect::<Vec<_>>()).unwrap();
    let floats = |rows| AOperand::Float(FloatMatrix::F32(floats(rows)));
    let cases: [(&(dyn Fn(usize) -> AOperand<'static> + Sync), QuantizeA); 4] = [
        (&|rows| AOperand::Quantized(matrix("a", rows, k)), QuantizeA::No),
        (&floats, QuantizeA::No),
        (&floats, QuantizeA::Static(0.5)),
        (&floats, QuantizeA::Dynamic),
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
        let of = AFormat::of(&a(1));
        let gate_up = DualGemmDesc::new(ROWS, n, k, of, BlockFormat::Nvfp4);
        let linear = DualGemmDesc::linear(ROWS, n, k, of, BlockFormat::Nvfp4);
        let isas = Isa::ALL.into_iter().filter(|isa| isa.available());
        for (isa, (desc, weights)) in isas.flat_map(|isa| [(isa, (gate_up, &pair)), (isa, (linear, &one))]) {
            pool.install(|| {
                let options = CpuOptions { isa: Some(isa), threads: Some(2), ..CpuOptions::default() };
                let plan = CpuPlan::new(&DualGemmDesc { quantize_a, ..desc }, options).unwrap();
                let mut workspace = Workspace::new(&plan, 3).unwrap();
                for rows in [1, 16, ROWS] {
                    let a = a(rows);
                    let groups = [(0, 1), (1, 0), (1, rows - 1)].map(|(first_row, rows)| Group {
                        first_row,
                        rows,
                        weights,
                    });
                    let before = ALLOCATIONS.load(Ordering::SeqCst);
                    for _ in 0..20 {
                        workspace.multiply(&a, &groups, |_| Ok(Ignore)).unwrap();
                    }
                    let plan = workspace.plan();
                    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0, "{rows} rows: {plan}");
                }
            });
        }
    }
    pool.install(|| {
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        drop(std::hint::black_box(vec![1u8; 3]));
        assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 1, "allocations are counted");
    });
}
