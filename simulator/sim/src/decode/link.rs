//! Laying out a kernel: registers, variables, and the functions it calls.
//!
//! Every function the kernel reaches gets registers, local memory and parameters of its own in the kernel, in
//! order of first mention. A call graph with a cycle (recursion) is refused.

use super::Decoded;
use super::operand::{Names, Symbol};
use crate::error::Error;
use crate::memory::{FUNCTION_BASE, SHARED_RESERVED, Space};
use crate::program::{Callee, Inst, Kernel, Param, Reg, flow};
use crate::semantics::dot::Generation;
use crate::trap::Site;
use dualgemm_ptx::ast::{
    Address, AddressBase, Function, FunctionKind, Init, Instruction, Module, Operand, RegDecl, Statement,
    Variable,
};
use dualgemm_ptx::{Name, Space as VarSpace, Type};
use std::collections::{BTreeSet, HashMap};

/// Where a module's global and constant variables lie.
pub type Symbols = HashMap<Name, (Space, u64)>;

/// Bytes that ptxas gives at most to static shared memory, the parameters of a kernel, and the local memory of a thread.
const SHARED_LIMIT: u32 = 48 << 10;
const PARAM_LIMIT: u32 = 32764;
const LOCAL_LIMIT: u32 = 512 << 10;
/// Bytes of the constant variables of a module.
pub const CONST_LIMIT: u32 = 64 << 10;
/// Registers that a kernel may declare, with those of the functions that it calls. Compilers declare some ten thousand.
const REGISTER_LIMIT: u32 = 1 << 18;

/// Decodes a kernel of a module whose variables lie at `symbols`.
pub fn kernel(
    module: &Module,
    entry: &Function,
    symbols: &Symbols,
    generation: Generation,
) -> Decoded<Kernel> {
    let mut linker = Linker {
        kernel: Kernel { name: entry.name.to_string(), generation, ..Kernel::default() },
        names: Names::default(),
        opcodes: HashMap::new(),
        shared: HashMap::new(),
    };
    let reached = reach(module, entry)?;
    linker.names.push();
    for (name, (space, at)) in symbols {
        linker.names.declare(name.clone(), Symbol::Memory(*space, *at));
    }
    for f in module.functions().filter(|f| f.body.is_none()) {
        linker.names.declare(f.name.clone(), Symbol::Extern(f.name.clone()));
    }
    let pointers = function_pointers(module);
    for (callee, f) in (0..).zip(&reached) {
        let address = pointers.get(&f.name).copied().unwrap_or_default();
        linker.names.declare(f.name.clone(), Symbol::Function { callee, address });
    }
    linker.shared(module, entry, &reached)?;
    linker.names.push();
    for v in &entry.params {
        let (offset, bytes) = lay_out(&mut linker.kernel.param_bytes, (0, PARAM_LIMIT), v)?;
        linker.kernel.params.push(Param { name: v.name.to_string(), offset, bytes });
        linker.names.declare(v.name.clone(), Symbol::Memory(Space::Param, offset.into()));
    }
    linker.function(entry)?;
    linker.names.pop();
    for f in &reached {
        linker.names.push();
        linker.device_function(f, pointers.get(&f.name).copied().unwrap_or_default())?;
        linker.names.pop();
    }
    linker.directives(entry);
    Ok(linker.kernel)
}

/// Offset and size of a variable behind the `used` bytes of a memory that begins at `base`, since addresses are multiples of
/// the alignment, and has `limit`.
pub fn lay_out(used: &mut u32, (base, limit): (u32, u32), v: &Variable) -> Decoded<(u32, u32)> {
    let refused = |reason: String| Error::refused(v.line.0, &v.name, reason);
    let bytes = v.bytes().ok_or_else(|| refused("its size is not known".into()))?;
    let base = u64::from(base);
    let at = (base + u64::from(*used)).next_multiple_of(v.alignment().max(1).into()) - base;
    let end = at.saturating_add(bytes);
    if end > limit.into() {
        let what = "bytes are more than a kernel can have there";
        return Err(refused(format!("with it, {end} {what}, {limit}")));
    }
    *used = end as u32;
    Ok((at as u32, bytes as u32))
}

/// What pointers to the device functions of a module hold, the same in all its kernels.
pub fn function_pointers(module: &Module) -> HashMap<Name, u64> {
    let device = module.functions().filter(|f| f.kind == FunctionKind::Device && f.body.is_some());
    (0..).zip(device).map(|(i, f)| (f.name.clone(), FUNCTION_BASE + 16 * i)).collect()
}

/// Whether a function calls through a pointer: what it calls is neither one of `functions` nor provided.
fn calls_pointers(module: &Module, f: &Function) -> bool {
    let mut calls = f.instructions().filter(|i| i.root == "call");
    calls.any(|i| {
        let callee = i.operands.iter().find(|o| !matches!(o, Operand::Group(_)));
        matches!(callee, Some(Operand::Ident(n)) if !module.functions().any(|f| f.name == *n))
    })
}

/// Names that a function body mentions.
fn mentioned(f: &Function) -> BTreeSet<Name> {
    fn walk(operand: &Operand, out: &mut BTreeSet<Name>) {
        match operand {
            Operand::Ident(n) | Operand::Offset(n, _) => {
                out.insert(n.clone());
            }
            Operand::Address(Address { base: AddressBase::Ident(n), .. }) => {
                out.insert(n.clone());
            }
            Operand::Vector(l) | Operand::List(l) | Operand::Group(l) => l.iter().for_each(|o| walk(o, out)),
            Operand::Pair(a, b) => {
                walk(a, out);
                walk(b, out);
            }
            _ => {}
        }
    }
    let mut out = BTreeSet::new();
    f.instructions().flat_map(|i| &i.operands).for_each(|o| walk(o, &mut out));
    out
}

/// Device functions that `entry` reaches, in order of discovery.
fn reach<'m>(module: &'m Module, entry: &'m Function) -> Decoded<Vec<&'m Function>> {
    let device = module.functions().filter(|f| f.kind == FunctionKind::Device && f.body.is_some());
    let device: Vec<&Function> = device.collect();
    let by_name: HashMap<&Name, &Function> = device.iter().map(|f| (&f.name, *f)).collect();
    // Only calls count: a register may have the name of a function.
    let callees = |f: &'m Function| -> Vec<&'m Function> {
        let operands = f.instructions().filter(|i| i.root == "call").flat_map(|i| &i.operands);
        let named = operands.filter_map(|o| if let Operand::Ident(n) = o { by_name.get(n) } else { None });
        named.copied().collect()
    };
    let mut out: Vec<&Function> = Vec::new();
    // Whether a function is on the path that is being followed.
    let mut open: HashMap<&Name, bool> = HashMap::new();
    let mut roots = vec![entry];
    let mut pointers = false;
    while let Some(root) = roots.pop() {
        let mut path = vec![(root, callees(root))];
        open.insert(&root.name, true);
        while let Some((f, left)) = path.last_mut() {
            let Some(callee) = left.pop() else {
                open.insert(&f.name, false);
                path.pop();
                continue;
            };
            match open.get(&callee.name) {
                Some(true) => {
                    let reason = "it calls itself, directly or not: the simulator runs no recursion";
                    return Err(Error::refused(callee.line.0, &callee.name, reason));
                }
                Some(false) => {}
                None => {
                    out.push(callee);
                    open.insert(&callee.name, true);
                    path.push((callee, callees(callee)));
                }
            }
        }
        // A pointer may name any of them.
        if roots.is_empty() && !pointers && out.iter().chain([&entry]).any(|f| calls_pointers(module, f)) {
            pointers = true;
            let others: Vec<_> = device.iter().filter(|f| !open.contains_key(&f.name)).copied().collect();
            out.extend(&others);
            roots = others;
        }
    }
    Ok(out)
}

struct Linker {
    kernel: Kernel,
    names: Names,
    opcodes: HashMap<String, u16>,
    /// Offsets of the shared variables that functions declare, which may have one name in several scopes.
    shared: HashMap<*const Variable, u32>,
}

impl Linker {
    /// Lays out static shared variables that are used, then the start of dynamic shared memory.
    fn shared(&mut self, module: &Module, entry: &Function, reached: &[&Function]) -> Decoded<()> {
        let mut used = mentioned(entry);
        for f in reached {
            used.extend(mentioned(f));
        }
        let is_shared = |v: &&Variable| v.space == VarSpace::Shared && used.contains(&v.name);
        let (dynamic, fixed): (Vec<_>, Vec<_>) =
            module.variables().filter(is_shared).partition(|v| v.bytes().is_none_or(|n| n == 0));
        for v in fixed {
            let at = self.shared_variable(v)?;
            self.names.declare(v.name.clone(), Symbol::Shared(at));
        }
        for f in std::iter::once(&entry).chain(reached) {
            self.shared_in(f.body.as_deref().unwrap_or_default())?;
        }
        let to = dynamic.iter().map(|v| v.alignment()).max().unwrap_or(16).max(16);
        self.kernel.dynamic_offset =
            (SHARED_RESERVED + self.kernel.static_shared).next_multiple_of(to) - SHARED_RESERVED;
        for v in dynamic {
            self.names.declare(v.name.clone(), Symbol::Shared(SHARED_RESERVED + self.kernel.dynamic_offset));
        }
        Ok(())
    }

    /// Shared variables declared inside functions are static as well.
    fn shared_in(&mut self, body: &[Statement]) -> Decoded<()> {
        for s in body {
            match s {
                Statement::Variable(v) if v.space == VarSpace::Shared => {
                    let at = self.shared_variable(v)?;
                    self.shared.insert(v, at);
                }
                Statement::Block(inner) => self.shared_in(inner)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// The address of one more shared variable.
    fn shared_variable(&mut self, v: &Variable) -> Decoded<u32> {
        let (at, bytes) = lay_out(&mut self.kernel.static_shared, (SHARED_RESERVED, SHARED_LIMIT), v)?;
        self.kernel.shared_variables.push((v.name.to_string(), at, bytes));
        Ok(SHARED_RESERVED + at)
    }

    fn func_param(&mut self, v: &Variable) -> Decoded<(u32, u32)> {
        let (at, bytes) = lay_out(&mut self.kernel.func_param_bytes, (0, LOCAL_LIMIT), v)?;
        self.names.declare(v.name.clone(), Symbol::FuncParam { at, bytes });
        Ok((at, bytes))
    }

    fn device_function(&mut self, f: &Function, address: u64) -> Decoded<()> {
        let mut callee = Callee { entry: self.kernel.code.len() as u32, address, ..Callee::default() };
        for (list, out) in [(&f.params, &mut callee.params), (&f.returns, &mut callee.returns)] {
            for v in list {
                if v.space == VarSpace::Reg {
                    return Err(Error::refused(
                        v.line.0,
                        &v.name,
                        "parameters in registers are not executed: use .param",
                    ));
                }
                out.push(self.func_param(v)?);
            }
        }
        let first = self.kernel.rows;
        self.function(f)?;
        callee.registers = std::array::from_fn(|file| first[file]..self.kernel.rows[file]);
        self.kernel.callees.push(callee);
        Ok(())
    }

    fn function(&mut self, f: &Function) -> Decoded<()> {
        let start = self.kernel.code.len();
        self.block(f.body.as_deref().unwrap_or_default())?;
        // Falling off the end returns.
        let ret = Instruction {
            line: f.line,
            guard: None,
            root: Name::from("ret"),
            modifiers: Vec::new(),
            operands: Vec::new(),
        };
        self.instruction(&ret)?;
        flow::reconverge(&mut self.kernel.code, start);
        Ok(())
    }

    /// Decodes a block. Labels hold in all of it, other names from where they are declared.
    fn block(&mut self, body: &[Statement]) -> Decoded<()> {
        self.names.push();
        let mut pc = self.kernel.code.len() as u32;
        for s in body {
            match s {
                Statement::Label(_, name) => self.names.declare(name.clone(), Symbol::Label(pc)),
                Statement::Instruction(_) => pc += 1,
                Statement::Block(inner) => pc += count(inner),
                Statement::BranchTargets(name, list) => {
                    self.names.declare(name.clone(), Symbol::Targets(list.clone()));
                }
                _ => {}
            }
        }
        for s in body {
            match s {
                Statement::Instruction(i) => self.instruction(i)?,
                Statement::Block(inner) => self.block(inner)?,
                Statement::Reg(decl) => self.registers(decl)?,
                Statement::Variable(v) => self.variable(v)?,
                _ => {}
            }
        }
        self.names.pop();
        Ok(())
    }

    fn registers(&mut self, decl: &RegDecl) -> Decoded<()> {
        for (name, count) in &decl.names {
            let more = count.unwrap_or(u32::from(decl.vector.unwrap_or(1)));
            let declared: u32 = self.kernel.rows.iter().sum();
            if more > REGISTER_LIMIT - declared.min(REGISTER_LIMIT) {
                let reason = format!("a kernel can declare {REGISTER_LIMIT} registers here");
                return Err(Error::refused(decl.line.0, name, reason));
            }
            match (count, decl.vector) {
                (Some(n), _) => (0..*n).for_each(|i| self.register(format!("{name}{i}"), decl.ty)),
                (None, Some(n)) => ["x", "y", "z", "w"]
                    .iter()
                    .take(n.into())
                    .for_each(|c| self.register(format!("{name}.{c}"), decl.ty)),
                (None, None) => self.register(name.to_string(), decl.ty),
            }
        }
        Ok(())
    }

    fn register(&mut self, name: String, ty: Type) {
        let rows = &mut self.kernel.rows;
        let (reg, file, n) = match ty.bits() {
            1 => (Reg::Pred(rows[2]), 2, 1),
            64 => (Reg::R64(rows[1]), 1, 1),
            128 => (Reg::R128(rows[1]), 1, 2),
            _ => (Reg::R32(rows[0]), 0, 1),
        };
        rows[file] += n;
        self.kernel.names[file].extend(std::iter::repeat_n(name.clone(), n as usize));
        self.names.declare(Name::from(name), Symbol::Reg(reg));
    }

    fn variable(&mut self, v: &Variable) -> Decoded<()> {
        let symbol = match v.space {
            VarSpace::Shared => Symbol::Shared(self.shared[&std::ptr::from_ref(v)]),
            VarSpace::Local => {
                let (at, _) = lay_out(&mut self.kernel.local_bytes, (0, LOCAL_LIMIT), v)?;
                Symbol::Memory(Space::Local, at.into())
            }
            VarSpace::Param => return self.func_param(v).map(|_| ()),
            other => {
                return Err(Error::refused(
                    v.line.0,
                    &v.name,
                    format!("a .{other} variable belongs at module scope"),
                ));
            }
        };
        self.names.declare(v.name.clone(), symbol);
        Ok(())
    }

    fn instruction(&mut self, ast: &Instruction) -> Decoded<()> {
        let op = super::instruction(ast, &self.names)?;
        let guard = match &ast.guard {
            None => None,
            Some(g) => match self.names.get(&g.register) {
                Some(Symbol::Reg(Reg::Pred(i))) => Some((*i, g.negated)),
                _ => {
                    return Err(Error::Undeclared { line: ast.line.0, name: g.register.to_string() });
                }
            },
        };
        let opcode = ast.opcode();
        let next = self.kernel.opcodes.len() as u16;
        let opcode = *self.opcodes.entry(opcode).or_insert_with_key(|name| {
            self.kernel.opcodes.push(name.clone());
            next
        });
        self.kernel.code.push(Inst { op, guard, reconverge: u32::MAX, opcode });
        self.kernel.sites.push(Site { line: ast.line.0, text: text(ast) });
        Ok(())
    }

    fn directives(&mut self, entry: &Function) {
        let three = |name: &str| {
            entry.directive(name).filter(|v| !v.is_empty()).map(|v| {
                let at = |i: usize| v.get(i).map_or(1, |n| *n as u32);
                [at(0), at(1), at(2)]
            })
        };
        let one = |name: &str| entry.directive(name).and_then(|v| v.first()).map(|n| *n as u32);
        self.kernel.reqntid = three("reqntid");
        self.kernel.maxntid = three("maxntid");
        self.kernel.cluster = three("reqnctapercluster");
        self.kernel.maxnreg = one("maxnreg");
        self.kernel.minnctapersm = one("minnctapersm");
    }
}

/// An instruction on one line; long operand lists are cut.
fn text(ast: &Instruction) -> String {
    let full = ast.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    match full.char_indices().nth(140) {
        Some((at, _)) => format!("{}...", &full[..at]),
        None => full,
    }
}

fn count(body: &[Statement]) -> u32 {
    body.iter()
        .map(|s| match s {
            Statement::Instruction(_) => 1,
            Statement::Block(inner) => count(inner),
            _ => 0,
        })
        .sum()
}

/// The first bytes of a module variable; zeros follow. `symbols` gives the addresses that initializers mention.
pub fn initial_bytes(v: &Variable, symbols: &Symbols) -> Decoded<Vec<u8>> {
    let mut bytes = Vec::new();
    let error = |reason: String| Error::refused(v.line.0, &v.name, reason);
    if let Some(init) = &v.init {
        fill(init, v.ty, symbols, &mut bytes).map_err(error)?;
    }
    match v.bytes() {
        Some(total) if bytes.len() as u64 > total => {
            Err(error(format!("its initializer has {} bytes, the variable {total}", bytes.len())))
        }
        _ => Ok(bytes),
    }
}

fn fill(init: &Init, ty: Type, symbols: &Symbols, out: &mut Vec<u8>) -> Result<(), String> {
    let width = ty.bytes() as usize;
    let mut put = |value: u64| out.extend_from_slice(&value.to_le_bytes()[..width.min(8)]);
    match init {
        Init::Value(imm) => put(super::operand::immediate(*imm, ty)),
        Init::Symbol(name, offset) | Init::Generic(name, offset) => {
            let (space, at) = symbols.get(name).ok_or_else(|| format!("`{name}` is not a variable"))?;
            let at = at.wrapping_add(*offset as u64);
            let generic = matches!(init, Init::Generic(..));
            put(if generic { crate::memory::to_generic(*space, at) } else { at });
        }
        Init::List(list) => {
            for item in list {
                fill(item, ty, symbols, out)?;
            }
        }
    }
    Ok(())
}
