//! The dual GEMM problem as values: description, operands, epilogue expression and the f64 reference.
