//! Control flow, and instructions without a value: PTX ISA 9.7.12, `setmaxnreg`, `griddepcontrol`, hints.

use super::operand::Symbol;
use super::*;

/// A function outside the module that the simulator provides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Builtin {
    /// `vprintf(format, arguments)`
    Vprintf,
    /// `__assertfail(message, file, line, function, size)`
    Assertfail,
}

#[derive(Debug, Clone)]
pub enum Control {
    Indexed {
        index: Src,
        targets: Vec<u32>,
    },
    /// A call of a function of the module; offsets in the thread's parameter memory.
    Call {
        callee: u32,
        args: Vec<u32>,
        returns: Vec<u32>,
    },
    /// A call of the function that a pointer names.
    Indirect {
        target: Src,
        args: Vec<u32>,
        returns: Vec<u32>,
    },
    /// A call of a function the simulator provides.
    Builtin(Builtin, Vec<u32>, Vec<u32>),
    Return,
    Exit,
    Trap,
    /// `setmaxnreg`; `true`: `.inc`.
    Registers(bool, u32),
    /// `createpolicy`: an opaque value.
    Policy(Dst),
    /// `nanosleep`: others run first.
    Sleep,
    /// `griddepcontrol`; whether it waits.
    Dependency(bool),
    IsCanceled(Dst, Src),
    /// `clusterlaunchcontrol.query_cancel.get_first_ctaid`: components from the first.
    FirstCta(Vec<Dst>, u32, Src),
}

/// `bra`
pub fn branch(i: &mut Ins<'_>) -> Result<Op> {
    i.ignore(&["uni"]);
    i.finish()?;
    match i.operand(0)? {
        Operand::Ident(name) => Ok(Op::Branch(i.label(name)?)),
        _ => i.error("needs a label"),
    }
}

/// Hints: `prefetch`, `discard`, `applypriority`, `createpolicy`.
pub fn hint(i: &mut Ins<'_>) -> Result<Op> {
    if i.ast.root == "createpolicy" {
        return Ok(Op::Control(Control::Policy(i.dst(0)?)));
    }
    Ok(Op::Nop)
}

fn offsets(i: &Ins<'_>, operand: Option<&Operand>) -> Result<Vec<u32>> {
    let Some(Operand::Group(list)) = operand else { return Ok(Vec::new()) };
    list.iter()
        .map(|o| match o {
            Operand::Ident(name) => match i.names.get(name) {
                Some(Symbol::Memory(Space::FuncParam, at)) => Ok(*at as u32),
                _ => i.error(format!("`{name}` is not a .param variable, as arguments and results must be")),
            },
            _ => i.error("arguments and results must be .param variables"),
        })
        .collect()
}

fn call(i: &mut Ins<'_>) -> Result<Control> {
    i.ignore(&["uni"]);
    let operands = &i.ast.operands;
    let first_is_group = matches!(operands.first(), Some(Operand::Group(_)));
    let at = usize::from(first_is_group);
    let returns = offsets(i, if first_is_group { operands.first() } else { None })?;
    let args = offsets(i, operands.get(at + 1))?;
    let Some(Operand::Ident(name)) = operands.get(at) else { return i.error("needs a function") };
    match i.names.get(name) {
        Some(Symbol::Function { callee, .. }) => Ok(Control::Call { callee: *callee, args, returns }),
        // The prototype or the list of targets that follows the arguments tells ptxas what the simulator sees itself.
        Some(Symbol::Reg(_)) => Ok(Control::Indirect { target: i.src(at, Type::U64)?, args, returns }),
        Some(Symbol::Extern(name)) => match name.as_str() {
            "vprintf" => Ok(Control::Builtin(Builtin::Vprintf, args, returns)),
            "__assertfail" => Ok(Control::Builtin(Builtin::Assertfail, args, returns)),
            _ => i.error(format!(
                "`{name}` is not in the module; the simulator provides vprintf and __assertfail"
            )),
        },
        _ => i.error(format!("`{name}` is neither a function nor a pointer to one")),
    }
}

pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    let op = match i.ast.root.as_str() {
        "brx" => {
            i.ignore(&["idx", "uni"]);
            let Operand::Ident(list) = i.operand(1)? else { return i.error("needs a list of targets") };
            let Some(Symbol::Targets(names)) = i.names.get(list) else {
                return i.error(format!("`{list}` is no .branchtargets list"));
            };
            let targets = names.iter().map(|n| i.label(n)).collect::<Result<_>>()?;
            Control::Indexed { index: i.src(0, Type::U32)?, targets }
        }
        "call" => call(i)?,
        "ret" => {
            i.ignore(&["uni"]);
            Control::Return
        }
        "exit" => Control::Exit,
        "trap" | "brkpt" => Control::Trap,
        "setmaxnreg" => {
            i.ignore(&["sync", "aligned", "u32"]);
            let inc = i.need("a direction", &[("inc", true), ("dec", false)])?;
            let Src::Imm(n) = i.src(0, Type::U32)? else { return i.error("the count is a constant") };
            if !(24..=256).contains(&n) || n % 8 != 0 {
                return i.error(format!("{n} registers: the count is a multiple of 8 from 24 to 256"));
            }
            Control::Registers(inc, n as u32)
        }
        "griddepcontrol" => {
            Control::Dependency(i.need("an action", &[("wait", true), ("launch_dependents", false)])?)
        }
        "pmevent" => {
            i.ignore(&["mask"]);
            i.finish()?;
            return Ok(Op::Nop);
        }
        "nanosleep" => {
            i.ignore(&["u32"]);
            Control::Sleep
        }
        _ => return cluster_launch(i),
    };
    i.finish()?;
    Ok(Op::Control(op))
}

fn cluster_launch(i: &mut Ins<'_>) -> Result<Op> {
    if i.has("try_cancel") {
        return super::copy::try_cancel(i);
    }
    i.ignore(&["query_cancel", "b128", "b32", "pred", "v4"]);
    let component =
        i.one_of(&[("get_first_ctaid::x", 0), ("get_first_ctaid::y", 1), ("get_first_ctaid::z", 2)]);
    let op = match component {
        _ if i.has("is_canceled") => Control::IsCanceled(i.dst(0)?, i.src(1, Type::B128)?),
        Some(c) => Control::FirstCta(vec![i.dst(0)?], c, i.src(1, Type::B128)?),
        None if i.has("get_first_ctaid") => Control::FirstCta(i.dsts(0)?, 0, i.src(1, Type::B128)?),
        None => return i.error("needs .try_cancel or .query_cancel"),
    };
    i.finish()?;
    Ok(Op::Control(op))
}
