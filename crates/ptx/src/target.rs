//! The architectures a module can be written for, and sets of them.
//!
//! A suffix decides where the text may run: none = this and every later architecture, `f` = the same family,
//! `a` = this architecture alone. PTX ISA "PTX Module Directives: .target".

use crate::ast::Version;
use std::fmt;

macro_rules! targets {
    ($($variant:ident $text:literal $since:literal $doc:literal,)*) => {
        /// A `.target` this crate knows.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Target { $(#[doc = $doc] $variant,)* }

        impl Target {
            /// Every target, oldest first.
            pub const ALL: &'static [Target] = &[$(Target::$variant,)*];

            /// Its spelling in `.target`, e.g. `sm_90a`.
            pub const fn as_str(self) -> &'static str {
                match self { $(Target::$variant => $text,)* }
            }

            /// The target spelled `text`.
            pub fn from_name(text: &str) -> Option<Target> {
                match text { $($text => Some(Target::$variant),)* _ => None }
            }

            /// The first PTX ISA version that has it.
            pub const fn since(self) -> Version {
                match self { $(Target::$variant => Version::of(stringify!($since)),)* }
            }
        }
    };
}

targets! {
    Sm80 "sm_80" 7.0 "A100.",
    Sm89 "sm_89" 7.8 "L40, RTX 4090.",
    Sm90a "sm_90a" 8.0 "H100, H200.",
    Sm100a "sm_100a" 8.6 "B200.",
    Sm100f "sm_100f" 8.8 "B200 and B300.",
    Sm103a "sm_103a" 8.8 "B300.",
    Sm120a "sm_120a" 8.7 "RTX 5090, RTX PRO 6000.",
    Sm120f "sm_120f" 8.8 "RTX 50 series and DGX Spark.",
    Sm121a "sm_121a" 8.8 "DGX Spark.",
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Version {
    /// The version `major.minor`.
    pub const fn new(major: u16, minor: u16) -> Version {
        Version { major, minor }
    }

    /// The version a table spells as the literal `8.6`: one digit, a dot, one digit.
    pub(crate) const fn of(literal: &str) -> Version {
        let text = literal.as_bytes();
        assert!(text.len() == 3 && text[1] == b'.');
        Version { major: (text[0] - b'0') as u16, minor: (text[2] - b'0') as u16 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A set of targets: where an instruction exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Targets(u16);

impl Targets {
    /// Every target.
    pub const ALL: Targets = Targets((1 << Target::ALL.len()) - 1);
    /// From sm_89 on.
    pub const SM89_UP: Targets = Targets::ALL.without(Targets::of(&[Target::Sm80]));
    /// From sm_90 on.
    pub const SM90_UP: Targets = Targets::ALL.without(Targets::of(&[Target::Sm80, Target::Sm89]));
    /// sm_90a alone.
    pub const SM90A: Targets = Targets::of(&[Target::Sm90a]);
    /// From sm_100 on: both Blackwell families.
    pub const BLACKWELL: Targets = Targets::SM90_UP.without(Targets::SM90A);
    /// The data-centre family: sm_100a, sm_100f, sm_103a.
    pub const SM100: Targets = Targets::of(&[Target::Sm100a, Target::Sm100f, Target::Sm103a]);
    /// The data-centre family as architecture-specific targets: sm_100a, sm_103a.
    pub const SM100_ARCH: Targets = Targets::of(&[Target::Sm100a, Target::Sm103a]);
    /// sm_100a alone.
    pub const SM100A: Targets = Targets::of(&[Target::Sm100a]);
    /// The GeForce family: sm_120a, sm_120f, sm_121a.
    pub const SM120: Targets = Targets::of(&[Target::Sm120a, Target::Sm120f, Target::Sm121a]);

    /// The set of `list`.
    pub const fn of(list: &[Target]) -> Targets {
        let (mut bits, mut i) = (0, 0);
        while i < list.len() {
            bits |= 1 << list[i] as u16;
            i += 1;
        }
        Targets(bits)
    }

    /// Both sets together.
    pub const fn with(self, other: Targets) -> Targets {
        Targets(self.0 | other.0)
    }

    /// This set less `other`.
    pub const fn without(self, other: Targets) -> Targets {
        Targets(self.0 & !other.0)
    }

    /// Whether `target` is in the set.
    pub const fn contains(self, target: Target) -> bool {
        self.0 & (1 << target as u16) != 0
    }

    /// The targets in the set, oldest first.
    pub fn iter(self) -> impl Iterator<Item = Target> {
        Target::ALL.iter().copied().filter(move |&t| self.contains(t))
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, target) in self.iter().enumerate() {
            write!(f, "{}{target}", if i > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}
