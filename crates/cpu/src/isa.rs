//! Instruction sets that have kernels, and the one place that chooses between them.
//!
//! The choice is made at run time: one binary holds every kernel, and tests can force each. `Isa::checked` asks the
//! machine once. What it returns, `Available`, is the proof that every later call relies on: `Available::dispatch` runs a
//! `Work` in the copy that was compiled for that instruction set, and hands it a token of no size, which only
//! `dispatch` can make. Code that holds a token may use the instructions.

use crate::amx::Tiles;
use crate::{Error, w4a4, w4a16};

/// Calls a macro with `[features] arguments`. The features are both what the kernels of an instruction set are compiled with
/// and what a machine must have to run them; listing them once keeps the two equal.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! with_features {
    (Avx2, $to:ident! $arguments:tt) => {
        $to! { ["avx2" "fma" "f16c"] $arguments }
    };
    (AvxVnni, $to:ident! $arguments:tt) => {
        $to! { ["avx2" "fma" "f16c" "avxvnni"] $arguments }
    };
    (Avx512, $to:ident! $arguments:tt) => {
        $to! { ["avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512vl"] $arguments }
    };
    (Avx512Vnni, $to:ident! $arguments:tt) => {
        $to! { ["avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512vl" "avx512vnni"] $arguments }
    };
    (Avx512Bf16, $to:ident! $arguments:tt) => {
        $to! {
            ["avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512vl" "avx512vnni" "avx512vbmi" "avx512bf16"] $arguments
        }
    };
    // Tiles themselves are not a feature of stable Rust: see `amx`.
    (AmxBf16, $to:ident! $arguments:tt) => { $crate::isa::with_features! { Avx512Bf16, $to! $arguments } };
    (Neon, $to:ident! $arguments:tt) => { $to! { ["neon"] $arguments } };
    (NeonDot, $to:ident! $arguments:tt) => { $to! { ["neon" "dotprod"] $arguments } };
    (NeonI8mm, $to:ident! $arguments:tt) => { $to! { ["neon" "dotprod" "i8mm"] $arguments } };
    (NeonBf16, $to:ident! $arguments:tt) => { $to! { ["neon" "dotprod" "i8mm" "bf16"] $arguments } };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use with_features;

/// Calls a macro with the instruction sets of this architecture.
#[cfg(target_arch = "x86_64")]
macro_rules! native {
    ($to:ident) => {
        $to! { Avx2 AvxVnni Avx512 Avx512Vnni Avx512Bf16 AmxBf16 }
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! native {
    ($to:ident) => {
        $to! { Neon NeonDot NeonI8mm NeonBf16 }
    };
}

/// A function compiled for an instruction set: `compiled_for!(Avx2, { fn f(..) { .. } })`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! compiled_for {
    ($isa:ident, $function:tt) => { $crate::isa::with_features!($isa, compiled_for! $function); };
    ([$($feature:tt)*] { $(#[$attribute:meta])* $vis:vis unsafe fn $($rest:tt)* }) => {
        $(#[$attribute])* $(#[target_feature(enable = $feature)])* $vis unsafe fn $($rest)*
    };
    ([$($feature:tt)*] { $(#[$attribute:meta])* $vis:vis fn $($rest:tt)* }) => {
        $(#[$attribute])* $(#[target_feature(enable = $feature)])* $vis fn $($rest)*
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use compiled_for;

/// Implements `unsafe` methods of a trait, each by one expression.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! unsafe_methods {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? { $body:expr })*) => {$(
        #[inline(always)]
        unsafe fn $name($($argument: $type),*) $(-> $result)? {
            // SAFETY: the trait makes two demands on callers, and the expression needs no more. The machine has the
            // instruction set: callers hold its token. Pointers are valid for what the method reads or writes.
            unsafe { $body }
        }
    )*};
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use unsafe_methods;

/// The operations of one instruction set. A value is a token: code that holds one runs on a machine with the instruction set.
pub(crate) trait InstructionSet: w4a4::Vector + w4a16::Pairs {}

impl<T: w4a4::Vector + w4a16::Pairs> InstructionSet for T {}

/// The token of kernels without intrinsics, with fused multiply-adds or without.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable<const FUSED: bool>(());

/// Defines the tokens of instruction sets.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! tokens {
    ($($isa:ident)*) => {$(
        /// The token of the instruction set of this name.
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct $isa(());
    )*};
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
native!(tokens);

/// A computation that is compiled once per instruction set.
pub(crate) trait Work {
    /// Its result.
    type Output;

    /// Computes. Implementations must be `#[inline(always)]`, and so must everything they call: a function that is not inlined
    /// is compiled without the instruction set.
    fn run<S: InstructionSet>(self, token: S) -> Self::Output;
}

/// An instruction set that this machine has: [`Isa::checked`] is the only way to get one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Available {
    isa: Isa,
    /// The tiles that kernels may use.
    pub(crate) tiles: Tiles,
    /// Whether portable kernels fuse multiply-adds, if need be in software, so that tests can compare bits.
    #[cfg(test)]
    fused: bool,
}

impl Available {
    /// Runs `work`, compiled for this instruction set.
    pub(crate) fn dispatch<W: Work>(self, work: W) -> W::Output {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        macro_rules! run_compiled {
            ($($isa:ident)*) => {
                match self.isa {
                    $(Isa::$isa => {
                        compiled_for!($isa, {
                            fn compiled<W: Work>(work: W) -> W::Output {
                                work.run($isa(()))
                            }
                        });
                        // SAFETY: `checked` found all features that `compiled` is compiled with.
                        return unsafe { compiled(work) };
                    })*
                    // Portable: `checked` finds none of the others on this architecture.
                    _ => {}
                }
            };
        }
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        native!(run_compiled);
        #[cfg(test)]
        if self.fused {
            return work.run(Portable::<true>(()));
        }
        work.run(Portable::<FUSED>(()))
    }

    /// Portable kernels with fused multiply-adds.
    #[cfg(test)]
    pub(crate) fn fused_portable() -> Self {
        Self { isa: Isa::Portable, tiles: Tiles::No, fused: true }
    }

    /// The same with tiles in software.
    #[cfg(test)]
    pub(crate) fn emulating_tiles(self) -> Self {
        Self { tiles: Tiles::Emulated, ..self }
    }
}

dualgemm_formats::named! {
    /// An instruction set with kernels of its own: slowest first of each architecture, except that AVX512-BF16 is slow on some
    /// processors, see [`best`](Self::best).
    #[derive(PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Isa {
        /// Rust without intrinsics, in a form that compilers vectorize. Runs everywhere.
        Portable = "portable",
        /// x86-64 with AVX2, FMA and F16C (Haswell, Zen and later).
        Avx2 = "avx2",
        /// AVX2 and the 256-bit dot products of AVX-VNNI (Alder Lake, Zen 5 and later).
        AvxVnni = "avxvnni",
        /// AVX-512 F, BW and VL without VNNI (Skylake-X).
        Avx512 = "avx512",
        /// AVX-512 with VNNI (Cascade Lake, Ice Lake, Zen 4 and later).
        Avx512Vnni = "avx512vnni",
        /// AVX-512 with VNNI, VBMI and BF16 (Zen 4, Sapphire Rapids and later).
        Avx512Bf16 = "avx512bf16",
        /// The same, and tiles of bf16 with AMX (Sapphire Rapids and later), if the system lets a process use them.
        AmxBf16 = "amxbf16",
        /// ARM64, which always has NEON (Cortex-A72, Graviton 1).
        Neon = "neon",
        /// The same with dot products of bytes (Neoverse N1, Apple M1).
        NeonDot = "neondot",
        /// The same with products of matrices of bytes.
        NeonI8mm = "neoni8mm",
        /// The same with products of matrices of bf16 (Neoverse V1, N2 and V2, Apple M2 and later).
        NeonBf16 = "neonbf16",
    }
}

impl Isa {
    /// The environment variable that forces one, by its [`name`](Self::name).
    pub const ENV: &str = "DUALGEMM_ISA";

    /// Whether processors of the architecture that this is compiled for can have it.
    pub fn native(self) -> bool {
        let architecture = match self {
            Self::Portable => return true,
            Self::Neon | Self::NeonDot | Self::NeonI8mm | Self::NeonBf16 => "aarch64",
            _ => "x86_64",
        };
        std::env::consts::ARCH == architecture
    }

    /// Whether this machine can run it.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub fn available(self) -> bool {
        #[cfg(target_arch = "aarch64")]
        use std::arch::is_aarch64_feature_detected as is_detected;
        #[cfg(target_arch = "x86_64")]
        use std::arch::is_x86_feature_detected as is_detected;
        macro_rules! detected {
            ([$($feature:tt)*] ()) => { $(is_detected!($feature))&&* };
        }
        macro_rules! of_each {
            ($($isa:ident)*) => {
                match self {
                    Self::Portable => true,
                    $(Self::$isa => with_features!($isa, detected!()),)*
                    _ => false,
                }
            };
        }
        #[cfg(target_arch = "x86_64")]
        if self == Self::AmxBf16 && !crate::amx::permitted() {
            return false;
        }
        native!(of_each)
    }

    /// Whether this machine can run it.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn available(self) -> bool {
        self == Self::Portable
    }

    /// The fastest one that this machine has.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.available() && isa.pays()).unwrap_or(Self::Portable)
    }

    /// Whether it is as fast as those before it, on a processor that has it. VDPBF16PS is on AMD's; on an Emerald Rapids, bf16 take
    /// twice the time of 16-bit integers.
    fn pays(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Avx512Bf16 {
            // The first word of "AuthenticAMD".
            return std::arch::x86_64::__cpuid(0).ebx == u32::from_le_bytes(*b"Auth");
        }
        true
    }

    /// The one that [`Isa::ENV`] names, or else the fastest.
    ///
    /// # Errors
    /// If the variable names no instruction set, or one that this machine lacks.
    pub fn detect() -> Result<Self, Error> {
        match std::env::var(Self::ENV) {
            Ok(name) => name.parse::<Self>()?.require(),
            Err(_) => Ok(Self::best()),
        }
    }

    /// Itself, if this machine has it.
    ///
    /// # Errors
    /// If the machine lacks it.
    pub fn require(self) -> Result<Self, Error> {
        if self.available() { Ok(self) } else { Err(Error::IsaUnavailable { isa: self, best: Self::best() }) }
    }

    /// The tiles that its kernels use.
    pub(crate) fn tiles(self) -> Tiles {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Tiles::Vectors,
            #[cfg(target_arch = "x86_64")]
            Self::AmxBf16 => Tiles::Hardware,
            #[cfg(target_arch = "aarch64")]
            Self::NeonBf16 => Tiles::Vectors,
            _ => Tiles::No,
        }
    }

    /// The proof that this machine has it. Fails if the machine lacks it.
    pub(crate) fn checked(self) -> Result<Available, Error> {
        Ok(Available {
            isa: self.require()?,
            tiles: self.tiles(),
            #[cfg(test)]
            fused: FUSED,
        })
    }
}

/// Whether the target this is compiled for has a fused multiply-add.
pub(crate) const FUSED: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

impl std::str::FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::by_name(name).ok_or_else(|| Error::UnknownIsa { name: name.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_others_are_refused() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse::<Isa>().unwrap(), isa);
            // Documents have the names that options and the environment variable take.
            assert_eq!(serde_json::to_value(isa).unwrap(), isa.name());
        }
        assert_eq!(
            "sse9".parse::<Isa>().unwrap_err().to_string(),
            "there is no instruction set \"sse9\"; known are portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16, amxbf16, \
             neon, neondot, neoni8mm, neonbf16"
        );
    }

    #[test]
    fn the_best_is_available_and_nothing_better_is() {
        let best = Isa::best();
        assert!(best.available() && Isa::Portable.available());
        assert!(Isa::ALL.into_iter().all(|isa| isa.native() || !isa.available()));
        assert!(Isa::ALL.into_iter().filter(|&isa| isa > best).all(|isa| !isa.available() || !isa.pays()));
    }

    #[test]
    fn what_is_missing_is_refused_by_name() {
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.available()) {
            let message = isa.require().unwrap_err().to_string();
            assert!(message.starts_with(&format!("this machine has no {isa}")), "{message}");
        }
    }
}
