//! Failures: a number for programs, a line of text for people.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use dualgemm::{checkpoint, cpu, gemm, strategies};

/// What became of a call.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum dualgemm_status {
    /// Done.
    Ok = 0,
    /// A checkpoint cannot be read, or breaks a rule.
    Checkpoint = 1,
    /// An operand breaks a rule of its format or does not fit the plan.
    Operand = 2,
    /// Valid, but not possible with this build or on this machine.
    Unsupported = 3,
    /// An argument that makes no sense, such as a null pointer.
    Argument = 4,
    /// A bug in dualgemm; please report it.
    Internal = 5,
}

/// A failure before it is a number.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    status: dualgemm_status,
    message: String,
}

impl Failure {
    pub(crate) fn argument(message: String) -> Self {
        Self { status: dualgemm_status::Argument, message }
    }

    pub(crate) fn operand(message: String) -> Self {
        Self { status: dualgemm_status::Operand, message }
    }

    pub(crate) fn unsupported(message: String) -> Self {
        Self { status: dualgemm_status::Unsupported, message }
    }
}

impl<E: Into<dualgemm::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let status = match &error {
            dualgemm::Error::Checkpoint(checkpoint::Error::Unsupported { .. })
            | dualgemm::Error::NotForGpu { .. }
            | dualgemm::Error::Cpu(cpu::Error::IsaUnavailable { .. })
            | dualgemm::Error::Gpu(
                strategies::Error::Device(_)
                | strategies::Error::Unsupported { .. }
                | strategies::Error::NothingFits { .. }
                | strategies::Error::MadeOnHost { .. },
            ) => dualgemm_status::Unsupported,
            dualgemm::Error::NoTarget { .. }
            | dualgemm::Error::Gemm(gemm::Error::UnknownActivation { .. }) => dualgemm_status::Argument,
            dualgemm::Error::Checkpoint(_) => dualgemm_status::Checkpoint,
            _ => dualgemm_status::Operand,
        };
        Self { status, message: error.to_string() }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the body of a function of the interface.
pub(crate) fn report(body: impl FnOnce() -> Result<(), Failure>) -> dualgemm_status {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return dualgemm_status::Ok,
        Ok(Err(failure)) => failure,
        Err(_) => Failure {
            status: dualgemm_status::Internal,
            message: "internal fault: this is a bug in dualgemm, please report it".into(),
        },
    };
    // A name from a file may hold a zero, which would end the text.
    let text = CString::new(failure.message.replace('\0', "\u{fffd}")).unwrap_or_default();
    LAST.with(|last| *last.borrow_mut() = text);
    failure.status
}

/// What the last call of this thread that failed has to say: one line, which stays until another one fails. Never
/// null.
#[unsafe(no_mangle)]
pub extern "C" fn dualgemm_last_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

/// The version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn dualgemm_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
