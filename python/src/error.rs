//! From errors of the crates to the exception classes of `dualgemm.errors`, with the messages of the command.

use dualgemm::{checkpoint, cpu, formats, gemm, strategies};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The exception classes, by what is at fault.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// A file, its names or its contents.
    Checkpoint,
    /// A file that the system would not open.
    File,
    /// An array or a number that breaks a rule of its format or of the operation.
    Operand,
    /// Something that this build or machine cannot do.
    Unsupported,
    /// An argument that cannot be read.
    Argument,
}

impl Kind {
    fn class(self) -> &'static str {
        match self {
            Self::Checkpoint => "CheckpointError",
            Self::File => "CheckpointFileError",
            Self::Operand => "OperandError",
            Self::Unsupported => "UnsupportedError",
            Self::Argument => "ArgumentError",
        }
    }

    fn of(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        if let Some(error) = error.downcast_ref::<dualgemm::Error>() {
            return Some(Self::of_facade(error));
        }
        if let Some(error) = error.downcast_ref::<checkpoint::Error>() {
            return Some(Self::of_checkpoint(error));
        }
        if let Some(error) = error.downcast_ref::<cpu::Error>() {
            return Some(Self::of_cpu(error));
        }
        if let Some(error) = error.downcast_ref::<strategies::Error>() {
            return Some(Self::of_gpu(error));
        }
        if error.is::<dualgemm_cli::Unsupported>() {
            return Some(Self::Unsupported);
        }
        (error.is::<gemm::Error>() || error.is::<formats::Error>()).then_some(Self::Operand)
    }

    fn of_facade(error: &dualgemm::Error) -> Self {
        match error {
            dualgemm::Error::Checkpoint(error) => Self::of_checkpoint(error),
            dualgemm::Error::Cpu(error) => Self::of_cpu(error),
            dualgemm::Error::Gpu(error) => Self::of_gpu(error),
            dualgemm::Error::NoTarget { .. } => Self::Argument,
            dualgemm::Error::NotForGpu { .. } => Self::Unsupported,
            _ => Self::Operand,
        }
    }

    fn of_checkpoint(error: &checkpoint::Error) -> Self {
        match error {
            checkpoint::Error::Io { .. } | checkpoint::Error::Path { .. } => Self::File,
            checkpoint::Error::Unsupported { .. } => Self::Unsupported,
            checkpoint::Error::Name { .. } => Self::Argument,
            _ => Self::Checkpoint,
        }
    }

    fn of_cpu(error: &cpu::Error) -> Self {
        match error {
            cpu::Error::UnknownIsa { .. } | cpu::Error::IsaUnavailable { .. } => Self::Unsupported,
            _ => Self::Operand,
        }
    }

    fn of_gpu(error: &strategies::Error) -> Self {
        use strategies::Error::{Format, Gemm, Misaligned, NoKernel, NoStrategy, Operand};
        match error {
            Operand { .. } | Misaligned { .. } | Gemm(_) | Format(_) => Self::Operand,
            NoStrategy { .. } | NoKernel { .. } => Self::Argument,
            _ => Self::Unsupported,
        }
    }

    /// An exception of this class, which says the command's options as Python's arguments.
    pub fn raise(self, message: impl Into<String>) -> PyErr {
        let message = as_arguments(&message.into());
        Python::attach(|py| match classes(py, self) {
            Ok(class) => PyErr::from_type(class.clone(), message),
            Err(error) => error,
        })
    }
}

/// Returns an exception of a [`Kind`] with a message.
macro_rules! refuse {
    ($kind:ident, $($message:tt)*) => {
        return Err($crate::error::Kind::$kind.raise(format!($($message)*)))
    };
}
pub(crate) use refuse;

/// A message of the command with `--top-k` said as `top_k`. Other words that begin with two hyphens, such as parts of paths
/// and options of a whole command line (`--top-k=2`), stay.
pub fn as_arguments(message: &str) -> String {
    let message = message.rsplit_once("; see dualgemm").map_or(message, |(message, _)| message);
    let mut out = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(at) = rest.find("--") {
        let (before, option) = (&rest[..at], &rest[at + 2..]);
        let len = option
            .find(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'))
            .unwrap_or(option.len());
        let begins = before.chars().next_back().is_none_or(|c| c.is_whitespace() || "'`(".contains(c));
        let name = &option[..len];
        out.push_str(before);
        if begins
            && name.starts_with(|c: char| c.is_ascii_lowercase())
            && !option[len..].starts_with(['/', '.', '_', '='])
        {
            out.push_str(&name.replace('-', "_"));
        } else {
            out.push_str(&rest[at..at + 2 + len]);
        }
        rest = &option[len..];
    }
    out + rest
}

/// The class, imported once.
fn classes<'py>(py: Python<'py>, kind: Kind) -> PyResult<&'py Bound<'py, PyType>> {
    static CLASSES: [PyOnceLock<Py<PyType>>; 5] = [const { PyOnceLock::new() }; 5];
    CLASSES[kind as usize].import(py, "dualgemm.errors", kind.class())
}

/// The exception of an error of the facade.
pub fn facade(error: impl Into<dualgemm::Error>) -> PyErr {
    let error = error.into();
    Kind::of_facade(&error).raise(error.to_string())
}

/// The exception of a failure of the command's code.
pub fn failure(failure: &dualgemm_cli::Failure) -> PyErr {
    let kind = failure.error.as_ref().and_then(|error| error.chain().find_map(Kind::of));
    kind.unwrap_or(Kind::Argument).raise(&failure.line)
}
