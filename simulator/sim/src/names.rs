//! Enums whose values stand beside what PTX calls them.

/// Declares an enum of modifiers, and `NAMES`: its values by their PTX names, in the order in which they are looked for.
macro_rules! modifiers {
    ($(#[$meta:meta])* $name:ident { $($(#[doc = $doc:literal])? $value:ident $($text:literal)|+),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[doc = $doc])? $value),* }

        impl $name {
            /// Its values by their names.
            pub const NAMES: &'static [(&'static str, $name)] = &[$($(($text, $name::$value)),+),*];
        }
    };
}
pub(crate) use modifiers;
