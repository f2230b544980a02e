//! The extension module `dualgemm._dualgemm`: views of Python arrays in, facade calls with the GIL released, results
//! into arrays that the Python side allocated.
//!
//! Flow: [`array`] (memory's owner, address, type and strides) → [`operand`] (matrices that borrow it),
//! [`options`] (what callers say in words), [`checkpoint`] (opened once) → [`weights`], [`linear`], [`mlp`] and [`experts`], all
//! [`packed`], and [`decoder`] of several, on [`runners`] that they share or by address on a [`device`], [`convert`], [`challenge`] (the operations) → the facade. [`tools`] hands whole subcommands of the command over. Nothing here allocates a Python array and nothing imports a framework.

mod array;
mod challenge;
mod checkpoint;
mod convert;
mod decoder;
mod destination;
mod device;
mod error;
mod experts;
mod facts;
mod float_linear;
mod linear;
mod mlp;
mod number;
mod operand;
mod options;
mod packed;
mod pool;
mod runners;
mod tools;
mod weights;

use pyo3::prelude::*;

/// The compiled half of `dualgemm`; the functions that users call are in the package.
#[pymodule(gil_used = true)]
fn _dualgemm(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<checkpoint::Checkpoint>()?;
    module.add_class::<packed::Packed>()?;
    module.add_class::<mlp::Gated>()?;
    module.add_class::<weights::Weights>()?;
    module.add_class::<linear::Linear>()?;
    module.add_class::<float_linear::FloatLinear>()?;
    module.add_class::<mlp::Mlp>()?;
    module.add_class::<decoder::DecoderLayer>()?;
    module.add_class::<experts::Experts>()?;
    module.add_function(wrap_pyfunction!(decoder::attend_causal, module)?)?;
    module.add_function(wrap_pyfunction!(decoder::unseen, module)?)?;
    module.add_function(wrap_pyfunction!(convert::quantize, module)?)?;
    module.add_function(wrap_pyfunction!(convert::dequantize, module)?)?;
    module.add_function(wrap_pyfunction!(convert::scales_len, module)?)?;
    module.add_function(wrap_pyfunction!(convert::down, module)?)?;
    module.add_function(wrap_pyfunction!(challenge::challenge_operands, module)?)?;
    module.add_function(wrap_pyfunction!(challenge::challenge_scales, module)?)?;
    module.add_function(wrap_pyfunction!(challenge::reference, module)?)?;
    module.add_function(wrap_pyfunction!(tools::command, module)?)?;
    module.add_function(wrap_pyfunction!(tools::options, module)?)?;
    module.add_function(wrap_pyfunction!(tools::main, module)?)?;
    module.add("MOST_THREADS", pool::MOST_THREADS)?;
    module.add_function(wrap_pyfunction!(pool::set_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(pool::get_num_threads, module)?)?;
    Ok(())
}
