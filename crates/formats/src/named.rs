/// An enum whose values have names: `ALL` values in order, each one's `name`, the value `by_name`, and
/// [`Display`](std::fmt::Display). It is written as an enum whose values are its names.
#[doc(hidden)]
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* $vis:vis enum $type:ident { $($(#[$doc:meta])* $value:ident = $name:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        $vis enum $type { $($(#[$doc])* $value,)* }

        impl $type {
            /// Every value, in order.
            $vis const ALL: [Self; [$($name),*].len()] = [$(Self::$value),*];

            /// What commands, files and messages call it.
            $vis const fn name(self) -> &'static str {
                match self { $(Self::$value => $name,)* }
            }

            /// The value of this name.
            $vis fn by_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|value| value.name() == name)
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
