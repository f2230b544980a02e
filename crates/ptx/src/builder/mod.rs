//! The typed builder: a kernel is a Rust function that reads top to bottom and leaves PTX.
//!
//! [`Builder`] makes a module, [`Kernel`] one kernel. A method of `Kernel` appends one instruction (a few, where
//! the documentation says so) and returns the register it writes. Integer arithmetic is written as formulas
//! ([`Expr`]). Around an instruction, [`Kernel::to`] names the register to write, and [`Kernel::when`] and
//! [`Kernel::unless`] guard it:
//!
//! ```
//! use dualgemm_ptx::builder::*;
//! use dualgemm_ptx::{Target, ast::Version};
//!
//! let mut module = Builder::new(Target::Sm80, Version::new(7, 0));
//! module.kernel("double", |k| {
//!     let data = k.pointer("data");
//!     let data = k.ld_pointer(&data);
//!     let thread = k.special(Special::TidX);
//!     let place = k.offset(data, thread.mul_wide(4));
//!     let x = k.ld::<F32, _>(place);
//!     let y = k.add(x, x);
//!     k.st(place, y);
//! });
//! assert!(module.finish().unwrap().to_string().contains("add.rn.f32 %f1, %f0, %f0;"));
//! ```
//!
//! Names are deterministic: registers are numbered in order, labels carry the name given to the block.
//! [`Builder::finish`] checks every instruction against the table ([`crate::legal`]).

/// Enums whose values are words of the text.
macro_rules! words {
    ($($(#[$meta:meta])* $name:ident { $($(#[$attribute:meta])* $value:ident $word:literal $doc:literal,)* })*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$attribute])* #[doc = $doc] $value,)* }

        impl $name {
            /// The word.
            pub const fn as_str(self) -> &'static str {
                match self { $($name::$value => $word,)* }
            }
        }
    )*};
}

/// Methods that append one instruction: what they take and give, the opcode, and its sources, which are the arguments
/// unless they are listed.
macro_rules! instructions {
    ($($(#[$doc:meta])* $name:ident $(<$($g:ident: $bound:path),+>)? ($($arg:ident: $ty:ty),*) $(-> $result:ty)?
        = $opcode:expr $(, [$($source:expr),*])?;)*) => {
        impl $crate::builder::Kernel {$(
            $(#[$doc])*
            pub fn $name $(<$($g: $bound),+>)? (&mut self $(, $arg: $ty)*) $(-> Reg<$result>)? {
                let opcode = $opcode;
                let sources = instructions!(@sources ($($arg)*) $([$($source),*])?);
                instructions!(@append self opcode sources $($result)?)
            }
        )*}
    };
    (@sources ($($arg:ident)*)) => { vec![$($arg.operand()),*] };
    (@sources ($($arg:ident)*) [$($source:expr),*]) => { vec![$($source),*] };
    (@append $kernel:ident $opcode:ident $sources:ident) => { $kernel.push(&$opcode, $sources) };
    (@append $kernel:ident $opcode:ident $sources:ident $result:ty) => { $kernel.give(&$opcode, $sources) };
}

mod addr;
mod arith;
mod control;
mod cvt;
mod expr;
mod flow;
mod mbarrier;
mod memory;
mod mma;
mod reg;
mod tcgen05;
mod tma;
mod wgmma;

pub use addr::{Addr, AddrSpace, Cluster, Generic, Global, Shared, Tmem};
pub use arith::{Bits, Cmp, DoubleWidth, Float, Integer, Number, Ordered};
pub use control::{Redux, Shuffle, Special};
pub use expr::{Expr, Formula};
pub use flow::Loop;
pub use memory::{AtomOp, Atomic, Eviction, Scope, Semantics};
pub use mma::{HalfFormat, ScaleSelect};
pub use reg::{
    B8, B16, B32, B64, B128, Bf16, Bf16x2, Cond, F16, F16x2, F32, F32x2, F64, Pred, Reg, RegClass, RegType,
    S16, S32, S64, Src, U16, U32, U64, Value,
};
pub use tcgen05::{Collector, CtaGroup, Mma, MmaA, ScaleVector, TmemShape};
pub use tma::TmaOptions;
pub use wgmma::{WgmmaA, WgmmaAccumulate, WgmmaFormat};

use crate::ast::{
    Address, AddressBase, Directive, Function, FunctionKind, Guard, Instruction, Item, Line, Linkage, Module,
    Operand, Pointer, RegDecl, Statement, Variable, Version,
};
use crate::error::Error;
use crate::layout::{SmemLayout, TENSOR_MAP_BYTES};
use crate::legal;
use crate::target::Target;
use crate::types::{Space, Type};
use reg::{CLASSES, DECLARED};
use std::collections::HashMap;
use std::marker::PhantomData;

/// The name of a kernel's shared memory in the text.
const SMEM: &str = "smem";

/// Builds a module.
#[derive(Debug)]
pub struct Builder {
    module: Module,
    smem_alignment: Option<u32>,
    mistakes: Vec<Error>,
}

impl Builder {
    /// An empty module for `target` in PTX version `version`.
    pub fn new(target: Target, version: Version) -> Builder {
        Builder {
            module: Module::new(target, version, Vec::new()),
            smem_alignment: None,
            mistakes: Vec::new(),
        }
    }

    /// A comment above the module.
    pub fn header(&mut self, text: &str) {
        self.module.header.extend(text.lines().map(str::to_string));
    }

    /// A comment above what follows.
    pub fn comment(&mut self, text: &str) {
        self.module.items.extend(text.lines().map(|line| Item::Comment(line.to_string())));
    }

    /// Adds the kernel `name`, whose parameters and body `build` gives.
    pub fn kernel(&mut self, name: &str, build: impl FnOnce(&mut Kernel)) {
        let mut kernel = Kernel::new(name);
        build(&mut kernel);
        kernel.end(self);
    }

    /// The module.
    ///
    /// # Errors
    /// [`Error::Illegal`] with everything its target lacks; [`Error::Destination`] if [`Kernel::to`] was misused.
    pub fn finish(mut self) -> Result<Module, Error> {
        if let Some(mistake) = self.mistakes.into_iter().next() {
            return Err(mistake);
        }
        if let Some(align) = self.smem_alignment {
            let smem = Variable {
                linkage: Linkage::Extern,
                align: Some(align),
                dims: vec![None],
                ..Variable::new(Space::Shared, Type::B8, SMEM)
            };
            self.module.items.insert(0, Item::Variable(smem));
        }
        match legal::check(&self.module) {
            illegal if illegal.is_empty() => Ok(self.module),
            illegal => Err(Error::Illegal(illegal)),
        }
    }
}

/// A kernel parameter of a plain type.
#[derive(Debug, Clone)]
pub struct Param<T> {
    name: String,
    ty: PhantomData<T>,
}

/// A kernel parameter that points to global memory.
#[derive(Debug, Clone)]
pub struct PointerParam(String);

/// A kernel parameter that is a tensor map.
#[derive(Debug, Clone)]
pub struct TensorMapParam(String);

/// Builds one kernel.
#[derive(Debug)]
pub struct Kernel {
    name: String,
    params: Vec<Variable>,
    directives: Vec<Directive>,
    body: Vec<Statement>,
    /// How many registers of each class are in use.
    registers: [u32; CLASSES],
    /// How often each label name was used.
    labels: HashMap<String, u32>,
    guard: Option<Guard>,
    /// Class and index of the register the next result goes to.
    destination: Option<(usize, u32)>,
    smem_alignment: Option<u32>,
    mistakes: Vec<Error>,
}

impl Kernel {
    fn new(name: &str) -> Kernel {
        Kernel {
            name: name.into(),
            params: Vec::new(),
            directives: Vec::new(),
            body: Vec::new(),
            registers: [0; CLASSES],
            labels: HashMap::new(),
            guard: None,
            destination: None,
            smem_alignment: None,
            mistakes: Vec::new(),
        }
    }

    fn end(mut self, builder: &mut Builder) {
        if !matches!(self.body.last(), Some(Statement::Instruction(i)) if i.root == "ret" && i.guard.is_none())
        {
            self.ret();
        }
        let mut body: Vec<Statement> = DECLARED
            .iter()
            .zip(self.registers)
            .filter(|(_, count)| *count > 0)
            .map(|((ty, prefix), count)| {
                let names = vec![((*prefix).into(), Some(count))];
                Statement::Reg(RegDecl { line: Line::default(), vector: None, ty: *ty, names })
            })
            .collect();
        body.append(&mut self.body);
        builder.smem_alignment = builder.smem_alignment.max(self.smem_alignment);
        builder.mistakes.append(&mut self.mistakes);
        builder.module.items.push(Item::Function(Function {
            params: self.params,
            directives: self.directives,
            ..Function::new(FunctionKind::Entry, &self.name, body)
        }));
    }

    /// A comment above what follows; several lines if `text` has them.
    pub fn comment(&mut self, text: &str) {
        self.body.extend(text.lines().map(|line| Statement::Comment(line.to_string())));
    }

    // Launch bounds.

    fn directive(&mut self, name: &str, values: &[u32]) {
        let values = values.iter().map(|&v| v.into()).collect();
        self.directives.push(Directive::Numeric(name.into(), values));
    }

    /// `.reqntid`: the kernel is launched with exactly `threads` threads per CTA, in one dimension.
    pub fn required_threads(&mut self, threads: u32) {
        self.directive("reqntid", &[threads, 1, 1]);
    }

    /// `.minnctapersm`: at least `ctas` CTAs fit on a multiprocessor. Without this (or `.maxnreg`) ptxas ignores
    /// `setmaxnreg`.
    pub fn min_ctas(&mut self, ctas: u32) {
        self.directive("minnctapersm", &[ctas]);
    }

    /// `.explicitcluster` and `.reqnctapercluster`: clusters of `x * y * z` CTAs.
    pub fn cluster(&mut self, x: u32, y: u32, z: u32) {
        self.directive("explicitcluster", &[]);
        self.directive("reqnctapercluster", &[x, y, z]);
    }

    // Parameters.

    /// Declares a parameter.
    pub fn param<T: RegType>(&mut self, name: &str) -> Param<T> {
        self.params.push(Variable::new(Space::Param, T::TYPE, name));
        Param { name: name.into(), ty: PhantomData }
    }

    /// Declares a parameter that points to global memory.
    pub fn pointer(&mut self, name: &str) -> PointerParam {
        let pointer = Some(Pointer { space: Some(Space::Global), align: Some(16) });
        self.params.push(Variable { pointer, ..Variable::new(Space::Param, Type::U64, name) });
        PointerParam(name.into())
    }

    /// Declares a parameter that is a tensor map (`__grid_constant__ const CUtensorMap` in CUDA).
    pub fn tensor_map(&mut self, name: &str) -> TensorMapParam {
        self.params.push(Variable {
            align: Some(64),
            dims: vec![Some(TENSOR_MAP_BYTES as u64)],
            ..Variable::new(Space::Param, Type::B8, name)
        });
        TensorMapParam(name.into())
    }

    /// Loads a parameter.
    pub fn ld_param<T: RegType>(&mut self, param: &Param<T>) -> Reg<T> {
        let source = param_operand(&param.name);
        self.give(&format!("ld.param.{}", T::TYPE), vec![source])
    }

    /// Loads a pointer parameter and makes it a global address (two instructions).
    pub fn ld_pointer(&mut self, param: &PointerParam) -> Addr<Global> {
        let pointer: Reg<U64> = self.give("ld.param.u64", vec![param_operand(&param.0)]);
        Addr::new(self.give("cvta.to.global.u64", vec![pointer.operand()]))
    }

    /// The generic address of a tensor map parameter, as TMA instructions take it (two instructions).
    pub fn tensor_map_address(&mut self, param: &TensorMapParam) -> Reg<U64> {
        let address: Reg<U64> = self.give("mov.b64", vec![Operand::Ident(param.0.as_str().into())]);
        self.give("cvta.param.u64", vec![address.operand()])
    }

    // Shared memory.

    /// Declares the dynamic shared memory `layout` describes and gives its start; regions are
    /// `start.at(region.offset)`. The launch must provide `layout.bytes()` bytes. Lists the layout as a comment.
    pub fn shared(&mut self, layout: &SmemLayout) -> Addr<Shared> {
        self.comment(&layout.to_string());
        self.smem_alignment = self.smem_alignment.max(Some(layout.alignment()));
        Addr::new(self.give("mov.u32", vec![Operand::Ident(SMEM.into())]))
    }

    // Registers and guards.

    /// A new register, not yet written.
    pub fn register<T: RegType>(&mut self) -> Reg<T> {
        let count = &mut self.registers[T::Class::INDEX];
        *count += 1;
        Reg::new(*count - 1)
    }

    /// `n` new registers, not yet written.
    pub fn registers<T: RegType>(&mut self, n: usize) -> Vec<Reg<T>> {
        (0..n).map(|_| self.register()).collect()
    }

    /// The next instruction writes `register` instead of a new one.
    pub fn to<T: RegType>(&mut self, register: Reg<T>) -> &mut Kernel {
        self.destination = Some((T::Class::INDEX, register.index()));
        self
    }

    /// The next instruction is executed by threads for which `cond` holds.
    pub fn when(&mut self, cond: impl Into<Cond>) -> &mut Kernel {
        let cond = cond.into();
        self.guard = Some(Guard { negated: cond.negated, register: cond.register.name() });
        self
    }

    /// The next instruction is executed by threads for which `cond` does not hold.
    pub fn unless(&mut self, cond: impl Into<Cond>) -> &mut Kernel {
        self.when(!cond.into())
    }

    /// The register a result goes to.
    fn result<T: RegType>(&mut self) -> Reg<T> {
        match self.destination.take() {
            Some((class, index)) if class == T::Class::INDEX => Reg::new(index),
            Some((class, index)) => {
                let (ty, prefix) = DECLARED[class];
                self.mistakes.push(Error::Destination {
                    kernel: self.name.clone(),
                    register: format!("{prefix}{index}"),
                    declared: ty,
                    result: T::TYPE,
                });
                self.register()
            }
            None => self.register(),
        }
    }

    fn push(&mut self, opcode: &str, operands: Vec<Operand>) {
        if let Some((class, index)) = self.destination.take() {
            let (ty, prefix) = DECLARED[class];
            self.mistakes.push(Error::NoResult {
                kernel: self.name.clone(),
                register: format!("{prefix}{index}"),
                declared: ty,
                opcode: opcode.to_string(),
            });
        }
        let mut parts = opcode.split('.');
        let root = parts.next().unwrap_or_default();
        let instruction = Instruction::new(root, parts.map(Into::into), operands);
        self.body.push(Statement::Instruction(Instruction { guard: self.guard.take(), ..instruction }));
    }

    /// Appends an instruction with one result, written first.
    fn give<T: RegType>(&mut self, opcode: &str, sources: Vec<Operand>) -> Reg<T> {
        let result = self.result::<T>();
        let mut operands = vec![result.operand()];
        operands.extend(sources);
        self.push(opcode, operands);
        result
    }
}

fn param_operand(name: &str) -> Operand {
    Operand::Address(Address { base: AddressBase::Ident(name.into()), offset: 0, unified: false })
}

fn number(value: i64) -> Operand {
    Operand::Imm(crate::ast::Immediate::Int(value))
}

fn vector<T: RegType>(registers: &[Reg<T>]) -> Operand {
    Operand::Vector(registers.iter().map(|r| r.operand()).collect())
}
