//! The choice of kernel, tile and threads for a problem. It depends on the description alone, prints and serializes.

use dualgemm_gemm::{AFormat, DualGemmDesc};

use crate::float_linear::VECTOR_ROWS;
use crate::pack::{CHUNK, CHUNK_K, PANEL, panel_columns};
use crate::tile::MAX_TILE_ROWS;
use crate::workspace::Input;
use crate::{Error, Isa, team, w4a4, w4a16};

/// Choices of a caller. By default the plan chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuOptions {
    /// Instruction set; by default what [`Isa::detect`] finds.
    pub isa: Option<Isa>,
    /// Threads; by default those of the [`Team`](crate::Team) that the caller is inside of, or else of the current rayon pool.
    pub threads: Option<usize>,
    /// Computes C twice if its tensor scale comes from its values: once for the scale, once for the result. That takes twice the
    /// time and saves the `4 · m · n · batch` bytes that C takes in f32 until the scale is known.
    pub dynamic_c_twice: bool,
}

/// How a [`DualGemmDesc`] is computed on this CPU.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CpuPlan {
    /// The problem.
    pub desc: DualGemmDesc,
    /// Instruction set.
    pub isa: Isa,
    /// Kernel: instruction set, operand widths, rows and features of a tile.
    pub kernel: String,
    /// Rows that are multiplied together.
    pub tile_rows: usize,
    /// Features of each half that are multiplied together; of a linear layer twice as many.
    pub tile_features: usize,
    /// Threads that share the work.
    pub threads: usize,
    /// Whether C is computed twice, first for its tensor scale: [`CpuOptions::dynamic_c_twice`].
    #[serde(default)]
    pub twice: bool,
    /// Multiplications and additions, counted once even if C is computed twice.
    pub flops: f64,
    /// The fewest bytes that have to move: A, C and the packed weights once each.
    pub bytes: f64,
}

impl CpuPlan {
    /// Plans a problem.
    ///
    /// # Errors
    /// If the description breaks a rule, or the options name an instruction set that the machine lacks.
    pub fn new(desc: &DualGemmDesc, options: CpuOptions) -> Result<Self, Error> {
        desc.check()?;
        let isa = options.isa.map_or_else(Isa::detect, Isa::require)?;
        let threads = options.threads.unwrap_or_else(team::threads).max(1);
        let a = desc.a_compute();
        let (operands, most_rows) = match (a.block_format(), desc.b.block_format()) {
            (_, None) => ("floats", VECTOR_ROWS),
            (Some(_), _) => ("w4a4", w4a4::tile_rows(isa, a, desc.b, desc.k)),
            (None, _) => ("w4a16", w4a16::tile_rows(isa, desc)),
        };
        let tile_rows = desc.m.min(most_rows);
        let panels = (desc.n.div_ceil(panel_columns(desc.op)) * desc.batch) as f64;
        let packed = match desc.b.block_format() {
            Some(_) => panels * (desc.k / CHUNK_K * CHUNK) as f64,
            None => desc.weight_bytes(),
        };
        let nominal = DualGemmDesc { n: 0, ..*desc }.bytes();
        let c = desc.out.bits_per_element() / 8.0 * (desc.m * desc.n * desc.batch) as f64;
        Ok(Self {
            desc: *desc,
            isa,
            kernel: format!("{isa}-{operands}-{tile_rows}x{PANEL}"),
            tile_rows,
            tile_features: PANEL,
            threads,
            twice: options.dynamic_c_twice && desc.out.is_dynamic(),
            flops: desc.flops(),
            bytes: nominal + packed + c,
        })
    }

    /// Rows of A over all batch entries.
    pub(crate) fn rows(&self) -> usize {
        self.desc.m * self.desc.batch
    }

    /// Checks the rules that a plan from a file may break.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.desc.check()?;
        self.isa.require()?;
        let most_threads = rayon::max_num_threads();
        if !(1..=MAX_TILE_ROWS).contains(&self.tile_rows) || !(1..=most_threads).contains(&self.threads) {
            return Err(Error::NotPlanned {
                what: "a plan",
                found: format!("for tiles of {} rows and {} threads", self.tile_rows, self.threads),
                expected: format!("1 to {MAX_TILE_ROWS} rows and 1 to {most_threads} threads"),
            });
        }
        Ok(())
    }

    /// The error for an A that the plan was not made for.
    pub(crate) fn not_a(&self, input: &Input<'_>) -> Error {
        let a = input.a;
        Error::NotPlanned {
            what: "A",
            found: format!("{} [{}, {}]", AFormat::of(a), input.rows(), a.k()),
            expected: format!("{} with up to {} rows and K = {}", self.desc.a, self.rows(), self.desc.k),
        }
    }
}

impl std::fmt::Display for CpuPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { desc, kernel, threads, flops, bytes, .. } = self;
        let plural = if *threads == 1 { "" } else { "s" };
        let twice = if self.twice { ", twice for the tensor scale of C" } else { "" };
        // Small problems, too, are more than 0.
        let (flop, unit) = if *flops < 1e8 { (flops / 1e6, "MFLOP") } else { (flops / 1e9, "GFLOP") };
        write!(
            f,
            "{desc}\n  {kernel} on {threads} thread{plural}{twice}: {flop:.3} {unit}, {:.2} MB, {:.0} FLOP/byte",
            bytes / 1e6,
            flops / bytes
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workspace;
    use dualgemm_formats::BlockFormat;
    use dualgemm_gemm::{OutFormat, OutScale};

    fn plan(m: usize, a: AFormat) -> CpuPlan {
        let desc = DualGemmDesc::new(m, 100, 64, a, BlockFormat::Nvfp4);
        CpuPlan::new(&desc, CpuOptions { isa: Some(Isa::Portable), threads: Some(2), dynamic_c_twice: true })
            .unwrap()
    }

    #[test]
    fn prints_what_will_run() {
        assert_eq!(
            plan(200, AFormat::Nvfp4).to_string(),
            "C[200,100] f32 = silu(A[200,64] nvfp4 · B1,B2[100,64]ᵀ nvfp4)\n  portable-w4a4-64x16 on 2 threads: \
             5.120 MFLOP, 0.10 MB, 54 FLOP/byte"
        );
        assert_eq!(plan(3, AFormat::Bf16).kernel, "portable-w4a16-3x16");
        assert_eq!(plan(300, AFormat::Bf16).kernel, "portable-w4a16-256x16");
    }

    #[test]
    fn only_a_dynamic_c_is_computed_twice() {
        let scale_layout = dualgemm_formats::ScaleLayout::Linear;
        for (global_scale, twice) in [(OutScale::Static(1.0), false), (OutScale::Dynamic, true)] {
            let mut desc = DualGemmDesc::new(3, 16, 64, AFormat::Nvfp4, BlockFormat::Nvfp4);
            desc.out = OutFormat::Nvfp4 { scale_layout, global_scale };
            let options = CpuOptions { dynamic_c_twice: true, ..CpuOptions::default() };
            let plan = CpuPlan::new(&desc, options).unwrap();
            assert_eq!(plan.twice, twice);
            assert_eq!(plan.to_string().contains(", twice for the tensor scale of C: "), twice, "{plan}");
        }
    }

    #[test]
    fn bytes_count_the_pack_with_its_padding() {
        // 7 panels of 4 chunks, 3 rows of 64 elements of 4.5 bits, 3 rows of 100 f32.
        assert_eq!(plan(3, AFormat::Nvfp4).bytes, (7 * 4 * 288 + 3 * 36 + 3 * 100 * 4) as f64);
        assert_eq!(plan(3, AFormat::Nvfp4).flops, (4 * 3 * 100 * 64) as f64);
    }

    #[test]
    fn survives_json_and_is_checked_before_use() {
        let plan = plan(5, AFormat::Nvfp4);
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<CpuPlan>(&text).unwrap(), plan);
        for (tile_rows, threads) in [(0, 2), (MAX_TILE_ROWS + 1, 2), (5, 0), (5, 1 << 40)] {
            let bad = CpuPlan { tile_rows, threads, ..plan.clone() };
            let message = Workspace::new(&bad, 1).unwrap_err().to_string();
            assert!(message.starts_with(&format!("a plan is for tiles of {tile_rows} rows and {threads}")));
        }
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.available()) {
            assert!(matches!(
                Workspace::new(&CpuPlan { isa, ..plan.clone() }, 1),
                Err(Error::IsaUnavailable { .. })
            ));
        }
    }

    #[test]
    fn buffers_that_no_memory_holds_are_refused() {
        for a in [AFormat::Nvfp4, AFormat::Bf16] {
            let wide = DualGemmDesc::new(1, 1, 1 << 59, a, BlockFormat::Nvfp4);
            // Systems promise terabytes that they don't have, but not more than addresses have bits for.
            for plan in [plan(1 << 53, a), CpuPlan::new(&wide, CpuOptions::default()).unwrap()] {
                let message = Workspace::new(&plan, 1).unwrap_err().to_string();
                assert!(message.contains("do not fit the memory"), "{message}");
            }
        }
        // Groups without rows take no memory.
        assert!(Workspace::new(&plan(5, AFormat::Nvfp4), usize::MAX).is_ok());
    }

    #[test]
    fn broken_rules_are_named_before_anything_is_planned() {
        let desc = DualGemmDesc::new(1, 1, 24, AFormat::Nvfp4, BlockFormat::Nvfp4);
        let message = CpuPlan::new(&desc, CpuOptions::default()).unwrap_err().to_string();
        assert_eq!(message, "K = 24 is not a multiple of 16, the block length of A in nvfp4");
    }
}
