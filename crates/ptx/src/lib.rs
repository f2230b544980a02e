//! PTX as a typed Rust program: instruction tables, builder, printer, parser.
