//! A kernel ready to run: what `decode` makes of the syntax tree.
//!
//! Everything a name can mean is resolved once. Registers are rows of the warp's register file, labels are
//! positions in `code`, variables are offsets or addresses. Device functions that a kernel calls are part of its
//! code, each with registers and memory of its own, so a call is a jump (recursion is refused at load).

pub mod flow;

use crate::exec::Op;
use crate::semantics::dot::Generation;
use crate::trap::Site;
use std::ops::Range;

/// A register: a row of 32 lanes in one of three files, or a predicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reg {
    /// 32 bits or less, zero-extended.
    R32(u32),
    /// 64 bits.
    R64(u32),
    /// 128 bits: this row of the 64-bit file and the next.
    R128(u32),
    /// One bit per lane.
    Pred(u32),
}

impl Reg {
    /// Bits a lane holds.
    pub const fn bits(self) -> u32 {
        match self {
            Reg::R32(_) => 32,
            Reg::R64(_) => 64,
            Reg::R128(_) => 128,
            Reg::Pred(_) => 1,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Src {
    Reg(Reg),
    /// The complement of a predicate.
    NotPred(u32),
    /// A constant, already in the bits of the type it is used as.
    Imm(u64),
    /// The address of a shared variable at this offset; the CTA's rank is added when read.
    Shared(u32),
    /// A special register: its row of [`SPECIALS`](crate::machine::ids::SPECIALS), and which component.
    Special(u8, u8),
}

/// Where a result goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dst {
    Reg(Reg),
    /// Nowhere (`_`).
    Sink,
}

#[derive(Debug, Clone)]
pub struct Inst {
    pub op: Op,
    /// The guard: predicate row, and whether it is negated.
    pub guard: Option<(u32, bool)>,
    /// For a branch: where lanes that part meet again, `u32::MAX` if nowhere.
    pub reconverge: u32,
    /// Position of its opcode in [`Kernel::opcodes`].
    pub opcode: u16,
}

/// A parameter of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// As the text names it.
    pub name: String,
    /// Its offset among the parameters.
    pub offset: u32,
    /// Its size.
    pub bytes: u32,
}

/// Offset and size of a parameter or result in the thread's parameter memory.
pub type Given = (u32, u32);

/// A device function as a call sees it: where its parameters lie in the thread's parameter memory.
#[derive(Debug, Clone, Default)]
pub struct Callee {
    /// First instruction.
    pub entry: u32,
    /// What a pointer to it holds.
    pub address: u64,
    pub params: Vec<Given>,
    pub returns: Vec<Given>,
    /// Its registers, from the first row to behind the last of 32-bit, 64-bit and predicate rows.
    pub registers: [Range<u32>; 3],
}

/// A kernel with all it calls.
#[derive(Debug, Clone, Default)]
pub struct Kernel {
    /// As the text names it.
    pub name: String,
    /// Its instructions from position 0, then those of the functions it calls.
    pub(crate) code: Vec<Inst>,
    /// The text of each instruction.
    pub(crate) sites: Vec<Site>,
    /// Names of the opcodes that occur.
    pub(crate) opcodes: Vec<String>,
    /// Device functions called.
    pub(crate) callees: Vec<Callee>,
    /// Its parameters.
    pub params: Vec<Param>,
    pub(crate) param_bytes: u32,
    /// Rows of 32-bit, 64-bit and predicate registers.
    pub(crate) rows: [u32; 3],
    /// Static shared memory, bytes.
    pub(crate) static_shared: u32,
    /// Offset of dynamic shared memory from the first usable byte, which is `static_shared` aligned.
    pub dynamic_offset: u32,
    /// Local memory of a thread, bytes.
    pub(crate) local_bytes: u32,
    /// Parameter memory of a thread for calls, bytes.
    pub(crate) func_param_bytes: u32,
    pub(crate) reqntid: Option<[u32; 3]>,
    /// `.maxntid`: the most threads of a CTA.
    pub maxntid: Option<[u32; 3]>,
    /// `.reqnctapercluster`
    pub(crate) cluster: Option<[u32; 3]>,
    /// `.maxnreg`: the most registers of a thread.
    pub maxnreg: Option<u32>,
    pub(crate) minnctapersm: Option<u32>,
    /// Variables in shared memory `(name, offset from the first usable byte, bytes)`, for messages.
    pub(crate) shared_variables: Vec<(String, u32, u32)>,
    /// Whose tensor cores the target has.
    pub(crate) generation: Generation,
    /// Register names by row, for messages: 32-bit, 64-bit, predicates.
    pub(crate) names: [Vec<String>; 3],
}

impl Kernel {
    /// The name of a register, for messages.
    pub fn register(&self, r: Reg) -> String {
        let (file, i) = match r {
            Reg::R32(i) => (0, i),
            Reg::R64(i) | Reg::R128(i) => (1, i),
            Reg::Pred(i) => (2, i),
        };
        self.names[file].get(i as usize).cloned().unwrap_or_else(|| format!("register {i}"))
    }
}
