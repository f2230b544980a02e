//! Named sets of problems. To add one, add a row to [`SHAPE_SETS`].

use crate::Error;

/// One problem size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Shape {
    /// Rows of A (tokens).
    pub m: usize,
    /// Features: rows of B1 and of B2.
    pub n: usize,
    /// Elements that are summed.
    pub k: usize,
}

impl Shape {
    /// A shape.
    pub const fn new(m: usize, n: usize, k: usize) -> Self {
        Self { m, n, k }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.n, self.k)
    }
}

/// A named list of shapes and why it is worth measuring.
#[derive(Debug, Clone, Copy)]
pub struct ShapeSet {
    /// Name on the command line.
    pub name: &'static str,
    /// What it stands for.
    pub doc: &'static str,
    /// The shapes.
    pub shapes: &'static [Shape],
}

const fn s(m: usize, n: usize, k: usize) -> Shape {
    Shape::new(m, n, k)
}

/// Every shape set.
pub const SHAPE_SETS: &[ShapeSet] = &[
    ShapeSet {
        name: "challenge",
        doc: "the four ranked shapes of the GPU MODE NVFP4 dual GEMM task",
        shapes: &[s(256, 4096, 7168), s(512, 4096, 7168), s(256, 3072, 4096), s(512, 3072, 7168)],
    },
    ShapeSet {
        name: "decode",
        doc: "few tokens: the weights must stream from memory once",
        shapes: &[
            s(1, 4096, 7168),
            s(8, 4096, 7168),
            s(16, 4096, 7168),
            s(32, 4096, 7168),
            s(64, 4096, 7168),
            s(1, 14336, 4096),
            s(16, 14336, 4096),
            s(64, 14336, 4096),
        ],
    },
    ShapeSet {
        name: "prefill",
        doc: "many tokens: the matrix units must stay busy",
        shapes: &[s(128, 4096, 7168), s(512, 14336, 4096), s(2048, 14336, 4096), s(8192, 14336, 4096)],
    },
    ShapeSet {
        name: "llama",
        doc: "gate/up of Llama 3.2 1B, Llama 3.2 3B, Llama 3.1 8B and 70B at 1, 16 and 512 tokens",
        shapes: &[
            s(1, 8192, 2048),
            s(16, 8192, 2048),
            s(512, 8192, 2048),
            s(1, 8192, 3072),
            s(16, 8192, 3072),
            s(512, 8192, 3072),
            s(1, 14336, 4096),
            s(16, 14336, 4096),
            s(512, 14336, 4096),
            s(1, 28672, 8192),
            s(16, 28672, 8192),
            s(512, 28672, 8192),
        ],
    },
];

/// The set of a name.
///
/// # Errors
/// Lists the names that exist.
pub fn shape_set(name: &str) -> Result<&'static ShapeSet, Error> {
    SHAPE_SETS.iter().find(|set| set.name == name).ok_or_else(|| Error::UnknownShapeSet {
        name: name.into(),
        known: SHAPE_SETS.iter().map(|set| set.name).collect::<Vec<_>>().join(", "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for set in SHAPE_SETS {
            assert_eq!(shape_set(set.name).unwrap().shapes, set.shapes);
            assert!(set.shapes.iter().all(|shape| shape.k.is_multiple_of(16)));
        }
        assert_eq!(
            SHAPE_SETS.iter().map(|s| s.name).collect::<std::collections::HashSet<_>>().len(),
            SHAPE_SETS.len()
        );
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let message = shape_set("ranked").unwrap_err().to_string();
        assert_eq!(message, "no shape set is called `ranked`; there are: challenge, decode, prefill, llama");
    }
}
