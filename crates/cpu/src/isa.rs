//! Instruction sets that kernels exist for, and which of them this machine has.
//!
//! Selection happens at run time only: one binary holds every kernel, and each can be forced for tests.

use crate::Error;

/// Calls a macro with `[features] arguments`, the features being what kernels of an instruction set are compiled with and
/// what a machine must have to run them: they stand here alone, so that the two cannot differ.
#[cfg(target_arch = "x86_64")]
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
}
#[cfg(target_arch = "x86_64")]
pub(crate) use with_features;

/// A function compiled for an instruction set: `compiled_for!(Avx2, { fn f(..) { .. } })`.
#[cfg(target_arch = "x86_64")]
macro_rules! compiled_for {
    ($isa:ident, $function:tt) => { $crate::isa::with_features!($isa, compiled_for! $function); };
    ([$($feature:tt)*] { $(#[$attribute:meta])* $vis:vis unsafe fn $($rest:tt)* }) => {
        $(#[$attribute])* $(#[target_feature(enable = $feature)])* $vis unsafe fn $($rest)*
    };
    ([$($feature:tt)*] { $(#[$attribute:meta])* $vis:vis fn $($rest:tt)* }) => {
        $(#[$attribute])* $(#[target_feature(enable = $feature)])* $vis fn $($rest)*
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use compiled_for;

/// An instruction set with kernels of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isa {
    /// Plain Rust, written so that compilers vectorize it. Runs everywhere.
    Portable,
    /// x86-64 with AVX2, FMA and F16C (Haswell, Zen and later).
    Avx2,
    /// AVX2 and the 256-bit dot products of AVX-VNNI (Alder Lake, Zen 5 and later).
    AvxVnni,
    /// AVX-512 F, BW and VL without VNNI (Skylake-X).
    Avx512,
    /// AVX-512 with VNNI (Cascade Lake, Ice Lake, Zen 4 and later).
    Avx512Vnni,
}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::AvxVnni, Self::Avx512, Self::Avx512Vnni];

    /// The environment variable that forces one, by its [`name`](Self::name).
    pub const ENV: &str = "DUALGEMM_ISA";

    /// Its name in plans, messages and [`Isa::ENV`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512vnni",
        }
    }

    /// Whether this machine can run it.
    #[cfg(target_arch = "x86_64")]
    pub fn available(self) -> bool {
        macro_rules! detected {
            ([$($feature:tt)*] ()) => { $(std::arch::is_x86_feature_detected!($feature))&&* };
        }
        match self {
            Self::Portable => true,
            Self::Avx2 => with_features!(Avx2, detected!()),
            Self::AvxVnni => with_features!(AvxVnni, detected!()),
            Self::Avx512 => with_features!(Avx512, detected!()),
            Self::Avx512Vnni => with_features!(Avx512Vnni, detected!()),
        }
    }

    /// Whether this machine can run it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn available(self) -> bool {
        self == Self::Portable
    }

    /// The best one that this machine has.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.available()).unwrap_or(Self::Portable)
    }

    /// The one that [`Isa::ENV`] asks for, or else the best.
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
    /// If not.
    pub fn require(self) -> Result<Self, Error> {
        if self.available() { Ok(self) } else { Err(Error::IsaUnavailable { isa: self, best: Self::best() }) }
    }
}

/// Whether the target this is compiled for has a fused multiply-add.
pub(crate) const FUSED: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|isa| isa.name() == name);
        known.ok_or_else(|| Error::UnknownIsa { name: name.into() })
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
            "there is no instruction set \"sse9\"; known are portable, avx2, avxvnni, avx512, avx512vnni"
        );
    }

    #[test]
    fn the_best_is_available_and_nothing_better_is() {
        let best = Isa::best();
        assert!(best.available() && Isa::Portable.available());
        assert!(Isa::ALL.into_iter().filter(|&isa| isa > best).all(|isa| !isa.available()));
    }

    #[test]
    fn what_is_missing_is_refused_by_name() {
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.available()) {
            let message = isa.require().unwrap_err().to_string();
            assert!(message.starts_with(&format!("this machine has no {isa}")), "{message}");
        }
    }
}
