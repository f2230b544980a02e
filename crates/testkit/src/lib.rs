//! Shapes, seeded inputs, tolerances and comparisons shared by the tests.
