//! A kernel under construction: buffers in, one instruction after another, buffers out.

use super::Draft;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::{Instruction, Operand, Version};
use dualgemm_ptx::isa::Row;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Register classes of sample instructions: prefix, PTX type, element type of a buffer, bytes.
pub const CLASSES: [(&str, &str, &str, usize); 8] = [
    ("p", "pred", "u32", 4),
    ("rc", "b8", "u8", 1),
    ("rs", "b16", "u16", 2),
    ("r", "b32", "u32", 4),
    ("rd", "b64", "u64", 8),
    ("rq", "b128", "u64", 16),
    ("f", "f32", "f32", 4),
    ("fd", "f64", "f64", 8),
];

/// The class of a sample's register, such as `rd` of `%rd3`.
pub fn class(register: &str) -> usize {
    let prefix = register.trim_start_matches('%').trim_end_matches(|c: char| c.is_ascii_digit());
    CLASSES.iter().position(|(p, ..)| *p == prefix).unwrap_or(3)
}

/// What a buffer holds: element type, generator, seed, elements per register.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    pub ty: String,
    pub generator: &'static str,
    pub seed: u64,
}

impl Source {
    pub fn new(ty: &str, generator: &'static str, seed: u64) -> Source {
        Source { ty: ty.into(), generator, seed }
    }
}

pub struct Kernel {
    row: &'static str,
    family: &'static str,
    pub target: Target,
    version: Version,
    pub block: usize,
    pub grid: usize,
    pub cluster: usize,
    inputs: BTreeMap<(Source, usize, usize), String>,
    outputs: BTreeMap<(String, String), usize>,
    arguments: Vec<(String, String)>,
    registers: BTreeMap<(usize, char), usize>,
    /// Declarations of the module and of the kernel.
    pub globals: String,
    pub locals: String,
    /// Before the first sample.
    pub setup: String,
    /// The samples.
    pub body: String,
}

/// The target whose card is at hand if the row has it, else the oldest.
pub fn target(row: &Row) -> Target {
    let first = row.targets.iter().next().unwrap_or(Target::Sm90a);
    if row.targets.contains(Target::Sm90a) { Target::Sm90a } else { first }
}

impl Kernel {
    /// For the row, on `threads` threads.
    pub fn new(row: &'static Row, threads: usize) -> Kernel {
        let target = target(row);
        Kernel {
            row: row.name,
            family: row.family.as_str(),
            target,
            version: row.since.max(target.since()),
            block: threads.min(512),
            grid: threads.div_ceil(512),
            cluster: 1,
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            arguments: Vec::new(),
            registers: BTreeMap::new(),
            globals: String::new(),
            locals: String::new(),
            setup: String::new(),
            body: String::new(),
        }
    }

    /// Needs at least this PTX version.
    pub fn at_least(&mut self, version: Version) {
        self.version = self.version.max(version);
    }

    fn threads(&self) -> usize {
        self.block * self.grid
    }

    /// A register `%d<class><i>` (written) or `%s<class><i>`.
    pub fn register(&mut self, class: usize, kind: char, i: usize) -> String {
        let count = self.registers.entry((class, kind)).or_default();
        *count = (*count).max(i + 1);
        format!("%{kind}{}{i}", CLASSES[class].0)
    }

    fn fresh(&mut self, class: usize) -> String {
        let i = self.registers.get(&(class, 's')).copied().unwrap_or_default();
        self.register(class, 's', i)
    }

    /// The name of a parameter with the given head line and declaration (`@` stands for the name).
    pub fn argument(&mut self, header: String, declaration: &str) -> String {
        let name = format!("p{}", self.arguments.len());
        self.arguments.push((header, format!(".param {} ", declaration.replace('@', &name))));
        name
    }

    /// Registers of `classes` loaded with consecutive elements of `source` per thread.
    pub fn load(&mut self, source: &Source, classes: &[usize]) -> Vec<String> {
        let class = classes[0];
        let count = classes.len();
        if let Some(first) = self.inputs.get(&(source.clone(), class, count)) {
            let (prefix, i) = first.split_at(2 + CLASSES[class].0.len());
            let i: usize = i.parse().unwrap_or(0);
            return (i..i + count).map(|j| format!("{prefix}{j}")).collect();
        }
        let (_, ty, _, bytes) = CLASSES[class];
        let element = crate::conformance::data::size(&source.ty).unwrap_or(bytes);
        let elements = self.threads() * count * bytes / element;
        let Source { ty: t, generator, seed } = source;
        let name = self.argument(format!("in {t} {generator} {seed} {elements}"), ".u64 @");
        let per_thread = count * bytes;
        let _ = writeln!(
            self.setup,
            "\tld.param.u64 %x0, [{name}];\n\tmad.wide.u32 %x0, %gid, {per_thread}, %x0;"
        );
        let registers: Vec<String> = (0..count).map(|_| self.fresh(class)).collect();
        for (j, register) in registers.iter().enumerate() {
            let offset = j * bytes;
            let _ = match CLASSES[class].0 {
                "p" => writeln!(
                    self.setup,
                    "\tld.global.u32 %w0, [%x0+{offset}];\n\tand.b32 %w0, %w0, 1;\n\tsetp.ne.u32 {register}, %w0, 0;"
                ),
                "rq" => writeln!(
                    self.setup,
                    "\tld.global.v2.b64 {{%x1, %x2}}, [%x0+{offset}];\n\tmov.b128 {register}, {{%x1, %x2}};"
                ),
                _ => writeln!(self.setup, "\tld.global.{ty} {register}, [%x0+{offset}];"),
            };
        }
        self.inputs.insert((source.clone(), class, count), registers[0].clone());
        registers
    }

    /// Stores a register of `class`; `ty` is the element type, `within` a tolerance or nothing.
    pub fn store(&mut self, class: usize, register: &str, ty: &str, within: &str) {
        let key = (ty.to_string(), within.to_string());
        let threads = self.threads();
        let next = self.outputs.len();
        let stored = self.outputs.entry(key).or_insert(next << 32);
        let (slot, index) = (*stored >> 32, *stored & 0xffff_ffff);
        let (name, ptx, _, bytes) = CLASSES[class];
        let wide = if name == "rq" { 2 } else { 1 };
        *stored += wide;
        let offset = index * threads * (bytes / wide);
        let _ = match name {
            "p" => writeln!(
                self.body,
                "\tselp.u32 %w0, 1, 0, {register};\n\tst.global.u32 [%o{slot}+{offset}], %w0;"
            ),
            "rq" => {
                let second = offset + threads * 8;
                writeln!(
                    self.body,
                    "\tmov.b128 {{%x1, %x2}}, {register};\n\tst.global.b64 [%o{slot}+{offset}], %x1;\n\tst.global.b64 [%o{slot}+{second}], %x2;"
                )
            }
            _ => writeln!(self.body, "\tst.global.{ptx} [%o{slot}+{offset}], {register};"),
        };
    }

    /// A buffer argument that the kernel writes itself; returns the register with its address.
    pub fn buffer(&mut self, header: String) -> String {
        let name = self.argument(header, ".u64 @");
        let register = self.fresh(4);
        let _ = writeln!(self.setup, "\tld.param.u64 {register}, [{name}];");
        register
    }

    pub fn draft(mut self) -> Draft {
        let threads = self.threads();
        let outputs: Vec<_> = std::mem::take(&mut self.outputs).into_iter().collect();
        let mut pointers = String::new();
        for ((ty, within), stored) in &outputs {
            let size = crate::conformance::data::size(ty).unwrap_or(4);
            let count = (stored & 0xffff_ffff) * threads;
            let tail = if within.is_empty() { String::new() } else { format!(" within {within}") };
            let name = self.argument(format!("out {ty} {count} = ?{tail}"), ".u64 @");
            let slot = stored >> 32;
            let _ = writeln!(
                pointers,
                "\tld.param.u64 %o{slot}, [{name}];\n\tmad.wide.u32 %o{slot}, %gid, {size}, %o{slot};"
            );
        }
        let mut text = format!("//! row {}\n", self.row);
        let (grid, block) = (self.grid, self.block);
        let cluster = if self.cluster > 1 { format!(" cluster {}", self.cluster) } else { String::new() };
        let _ = writeln!(text, "//! launch k grid {grid} block {block}{cluster}");
        for (header, _) in &self.arguments {
            let _ = writeln!(text, "//! {header}");
        }
        let _ = writeln!(text, ".version {}\n.target {}\n.address_size 64\n", self.version, self.target);
        text += &self.globals;
        text += ".visible .entry k(";
        text += &self.arguments.iter().map(|(_, d)| d.trim()).collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, ")\n.reqntid {block}, 1, 1\n{{\n{}", self.locals);
        for ((class, kind), count) in &self.registers {
            let (name, ty, ..) = CLASSES[*class];
            let _ = writeln!(text, "\t.reg .{ty} %{kind}{name}<{count}>;");
        }
        let _ = writeln!(text, "\t.reg .b64 %x<4>, %o<{}>;\n\t.reg .b32 %w<4>, %gid;", outputs.len().max(1));
        text += "\tmov.u32 %w0, %ctaid.x;\n\tmov.u32 %w1, %ntid.x;\n\tmov.u32 %gid, %tid.x;\n\tmad.lo.u32 %gid, %w0, %w1, %gid;\n";
        let _ = write!(text, "{pointers}{}{}", self.setup, self.body);
        text += "\tret;\n}\n";
        Draft { name: format!("{}/{}", self.family, self.row), text, expected: Box::new(Vec::new) }
    }
}

/// The instruction with every register name passed through `rename`.
pub fn renamed(instruction: &Instruction, rename: &mut dyn FnMut(usize, &str) -> String) -> Instruction {
    let mut changed = instruction.clone();
    for (i, operand) in changed.operands.iter_mut().enumerate() {
        rename_in(operand, &mut |name| rename(i, name));
    }
    changed
}

fn rename_in(operand: &mut Operand, rename: &mut dyn FnMut(&str) -> String) {
    match operand {
        Operand::Ident(name) | Operand::Not(name) if name.as_str().starts_with('%') => {
            *name = rename(name.as_str()).as_str().into();
        }
        Operand::Vector(list) | Operand::List(list) | Operand::Group(list) => {
            list.iter_mut().for_each(|o| rename_in(o, rename));
        }
        Operand::Pair(a, b) => {
            rename_in(a, rename);
            rename_in(b, rename);
        }
        Operand::Address(address) => {
            if let dualgemm_ptx::ast::AddressBase::Ident(name) = &mut address.base
                && name.as_str().starts_with('%')
            {
                *name = rename(name.as_str()).as_str().into();
            }
        }
        _ => {}
    }
}

/// The registers an operand names, in order.
pub fn registers(operand: &Operand) -> Vec<String> {
    let mut list = Vec::new();
    rename_in(&mut operand.clone(), &mut |name| {
        list.push(name.to_string());
        name.to_string()
    });
    list
}

/// A modifier that names a type.
pub fn last_type(instruction: &Instruction) -> &str {
    instruction.modifiers.last().map_or("", |m| m.as_str())
}
