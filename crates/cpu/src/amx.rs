//! The tile registers of AMX: what a thread does with them, and the permission to do it.
//!
//! Stable Rust has no intrinsics for them, so one block of assembly multiplies a whole stretch of K. Tests run the same kernels
//! with emulated tiles, which compute the bits that the SDM states for TDPBF16PS (volume 2, "Dot Product of BF16 Tiles
//! Accumulated into Packed Single Precision Tile"):
//!
//! ```text
//! for each of 16 sums, from 32 pairs of bf16:
//!     even = fma over k = 0, 2, .. 30 from 0        DAZ and FTZ: what is below 2⁻¹²⁶ counts as 0
//!     odd  = fma over k = 1, 3, .. 31 from 0
//!     sum  = sum + (even + odd)
//! ```

#[cfg(any(target_arch = "x86_64", test))]
use crate::tile::TILE_COLS;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::w4a16::dots::multiply_group;

/// Rows of A in a tile register.
pub(crate) const TILE_ROWS: usize = 16;

/// Elements of K in a tile register.
pub(crate) const TILE_K: usize = 32;

/// A group of rows, and a stretch of K of one panel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pass {
    /// `[step][row][32]` bf16.
    pub(crate) a: *const u16,
    /// 1 to [`TILE_ROWS`].
    pub(crate) rows: usize,
    /// `[step][gate, up][pair of k][feature][2]` bf16.
    pub(crate) b: *const u16,
    /// Steps of [`TILE_K`], at least one.
    pub(crate) steps: usize,
    /// `[row][32]`.
    pub(crate) sums: *mut f32,
    /// Whether the products are added to the sums, and do not overwrite them.
    pub(crate) add: bool,
}

/// The tile registers of a thread.
pub(crate) trait Unit {
    /// Takes the registers.
    ///
    /// # Safety
    /// The machine has the unit, and the system permits its use.
    unsafe fn new() -> Self;

    /// Multiplies. `fetch` is whether each step of hardware asks for the rows of the next one.
    ///
    /// # Safety
    /// The pointers are valid for the steps and rows of the pass, which has as many rows as it says it may.
    unsafe fn pass(&mut self, pass: &Pass, fetch: bool);
}

/// The tiles that kernels may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tiles {
    /// None.
    No,
    /// [`Vectors`] in their place.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    Vectors,
    /// Those of the processor.
    #[cfg(target_arch = "x86_64")]
    Hardware,
    /// Emulated ones.
    #[cfg(test)]
    Emulated,
}

impl Tiles {
    /// Whether these are tiles, which multiply many times as fast as vectors.
    pub(crate) const fn are_real(self) -> bool {
        match self {
            Self::No => false,
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Self::Vectors => false,
            #[cfg(target_arch = "x86_64")]
            Self::Hardware => true,
            #[cfg(test)]
            Self::Emulated => true,
        }
    }
}

/// Vectors in the place of tile registers.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[derive(Debug)]
pub(crate) struct Vectors;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl Unit for Vectors {
    unsafe fn new() -> Self {
        Self
    }

    unsafe fn pass(&mut self, pass: &Pass, _: bool) {
        // SAFETY: the caller of `new` vouched for the instructions, and the caller of this for the pointers.
        unsafe { multiply_group(pass) };
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use hardware::{Amx, permitted};

#[cfg(target_arch = "x86_64")]
mod hardware {
    use std::arch::asm;
    use std::sync::OnceLock;

    use super::{Pass, TILE_COLS, TILE_ROWS, Unit};

    /// Whether the processor multiplies tiles of bf16 and the system lets this process do so. Asks for the permission once: it
    /// holds for all threads, for as long as the process lives. From then on the system saves 8 KiB more of a thread that is
    /// interrupted by a signal while it uses tiles. Sandboxes like gVisor and kernels before 5.16 refuse.
    pub(crate) fn permitted() -> bool {
        static PERMITTED: OnceLock<bool> = OnceLock::new();
        *PERMITTED.get_or_init(|| has_tiles() && ask())
    }

    /// Looks for AMX-BF16 and AMX-TILE in leaf 7 of CPUID.
    fn has_tiles() -> bool {
        use std::arch::x86_64::{__cpuid_count, __get_cpuid_max};
        let bits = 1 << 22 | 1 << 24;
        __get_cpuid_max(0).0 >= 7 && __cpuid_count(7, 0).edx & bits == bits
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    fn ask() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        // SAFETY: the call takes two numbers, and changes only how much state the system saves for this process.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }

    #[cfg(not(all(target_os = "linux", not(miri))))]
    fn ask() -> bool {
        false
    }

    /// The real registers. They are released when this is dropped.
    #[derive(Debug)]
    pub(crate) struct Amx {
        /// The rows of the registers for groups that are not full; 0 if none are configured.
        rows: usize,
    }

    /// The operand of LDTILECFG for palette 1.
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        bytes_per_row: [u16; 16],
        rows: [u8; 16],
    }

    /// Prefetches the lines of the next tile of A.
    macro_rules! fetch_next {
        () => { fetch_next!(1024 1088 1152 1216 1280 1344 1408 1472 1536 1600 1664 1728 1792 1856 1920 1984) };
        ($($offset:literal)*) => { concat!($("prefetcht0 [{a} + ", $offset, "]\n"),*) };
    }

    /// A pass with these registers for the sums of gate and up, and for A.
    macro_rules! multiply {
        ($pass:ident, $gate:literal $up:literal $a:literal, $fetch:expr) => {{
            let &Pass { a, rows, b, steps, sums, add } = $pass;
            asm!(
                "test {add}, {add}",
                "jz 2f",
                concat!("tileloadd ", $gate, ", [{sums} + {sums_stride}]"),
                concat!("tileloadd ", $up, ", [{sums} + {sums_stride} + 64]"),
                "2:",
                concat!("tileloadd ", $a, ", [{a} + {stride}]"),
                "tileloadd tmm3, [{b} + {stride}]",
                concat!("tdpbf16ps ", $gate, ", ", $a, ", tmm3"),
                $fetch,
                "tileloadd tmm3, [{b} + {stride} + 1024]",
                concat!("tdpbf16ps ", $up, ", ", $a, ", tmm3"),
                "add {a}, {step}",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                concat!("tilestored [{sums} + {sums_stride}], ", $gate),
                concat!("tilestored [{sums} + {sums_stride} + 64], ", $up),
                concat!("tilezero ", $gate),
                concat!("tilezero ", $up),
                concat!("tilezero ", $a),
                "tilezero tmm3",
                a = inout(reg) a => _, b = inout(reg) b => _, steps = inout(reg) steps => _,
                sums = in(reg) sums, step = in(reg) rows * 64, add = in(reg) u64::from(add),
                stride = in(reg) 64usize, sums_stride = in(reg) TILE_COLS * size_of::<f32>(),
                options(nostack),
            );
        }};
    }

    impl Amx {
        /// Sets the rows of A and of sums of groups that are not full. That takes 0.1 µs.
        fn configure(&mut self, rows: usize) {
            if self.rows == rows || (self.rows > 0 && rows == TILE_ROWS) {
                return;
            }
            let mut configuration = Configuration {
                palette: 1,
                start_row: 0,
                reserved: [0; 14],
                bytes_per_row: [0; 16],
                rows: [0; 16],
            };
            let (rows, all) = (rows as u8, TILE_ROWS as u8);
            configuration.rows[..7].copy_from_slice(&[all, all, all, all, rows, rows, rows]);
            configuration.bytes_per_row[..7].fill(64);
            // SAFETY: whoever called `new` vouched for the unit, and the configuration keeps the rules of the palette. Tile
            // registers are all that changes, and no code but `pass` uses them.
            unsafe {
                asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, preserves_flags, readonly));
            }
            self.rows = rows.into();
        }
    }

    impl Unit for Amx {
        unsafe fn new() -> Self {
            Self { rows: 0 }
        }

        // A pass holds four registers, sums of gate and up, A and B. With six, two groups of rows would share B. But the fewer are held, the
        // better two threads of a core share the registers behind the names: on 16 threads of an Emerald Rapids, two to a core, 128
        // rows are multiplied in 12 % less time than with six, and on one thread in 6 % less. A register of zeros holds none, so all are
        // zero between passes: else the three for groups that are not full, which save a change of rows for each block of K, cost more
        // than they save. Where a step fetches the lines of A that the next one reads from the second-level cache, a long K takes 5 % less time, and
        // a short one 10 % more.
        unsafe fn pass(&mut self, pass: &Pass, fetch: bool) {
            self.configure(pass.rows);
            // SAFETY: the caller vouches for what is read and written: tiles have 64 bytes in each of their rows. Registers are zero
            // before and after a block, as configuring them makes them. A step of B is two tiles of 1024 bytes.
            unsafe {
                match (pass.rows == TILE_ROWS, fetch) {
                    (true, true) => multiply!(pass, "tmm0" "tmm1" "tmm2", fetch_next!()),
                    (true, false) => multiply!(pass, "tmm0" "tmm1" "tmm2", ""),
                    (false, _) => multiply!(pass, "tmm4" "tmm5" "tmm6", fetch_next!()),
                }
            }
        }
    }
    const _: () = assert!(TILE_ROWS * TILE_COLS * size_of::<f32>() == 2048);

    impl Drop for Amx {
        fn drop(&mut self) {
            if self.rows > 0 {
                // SAFETY: the registers are configured, so the machine has the instruction.
                unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
            }
        }
    }
}

#[cfg(test)]
pub(crate) use emulated::Emulated;

#[cfg(test)]
mod emulated {
    use super::{Pass, TILE_COLS, TILE_K, TILE_ROWS, Unit};

    /// Tiles in software, bit for bit.
    #[derive(Debug)]
    pub(crate) struct Emulated;

    /// DAZ or FTZ.
    fn flushed(x: f32) -> f32 {
        if x.abs() < f32::MIN_POSITIVE { 0f32.copysign(x) } else { x }
    }

    /// One sum of TDPBF16PS, from a row of A and a column of B.
    pub(crate) fn dot(sum: f32, a: &[u16; TILE_K], b: &[u16; TILE_K]) -> f32 {
        let value = |bits: u16| flushed(f32::from_bits(u32::from(bits) << 16));
        let mut chains = [0f32; 2];
        for (k, (&a, &b)) in a.iter().zip(b).enumerate() {
            chains[k % 2] = flushed(value(a).mul_add(value(b), chains[k % 2]));
        }
        flushed(flushed(sum) + flushed(chains[0] + chains[1]))
    }

    impl Unit for Emulated {
        unsafe fn new() -> Self {
            Self
        }

        unsafe fn pass(&mut self, pass: &Pass, _: bool) {
            let Pass { a, rows, b, steps, sums, add } = *pass;
            assert!((1..=TILE_ROWS).contains(&rows), "{rows} rows of a tile");
            for (step, row) in (0..steps).flat_map(|step| (0..rows).map(move |row| (step, row))) {
                for column in 0..TILE_COLS {
                    // SAFETY: the caller vouches for the steps and rows of the pass.
                    unsafe {
                        let sum = sums.add(row * TILE_COLS + column);
                        let a = a.add((step * rows + row) * TILE_K).cast::<[u16; TILE_K]>().read();
                        let b = b.add((step * TILE_COLS + column / 16 * 16) * TILE_K);
                        let b = std::array::from_fn(|k| b.add(k / 2 * 32 + column % 16 * 2 + k % 2).read());
                        *sum = dot(if add || step > 0 { *sum } else { 0.0 }, &a, &b);
                    }
                }
            }
        }
    }
}
