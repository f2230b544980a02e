//! Control flow, traps, calls, register reallocation: PTX ISA 9.7.12, `setmaxnreg`, `griddepcontrol`.

use super::*;
use crate::check::order::View;
use crate::decode::operand::Symbol;
use crate::machine::warp::ScopeKind;
use crate::memory::local::Local;
use crate::program::{Callee, Inst};

pub fn decode(i: &mut Ins<'_>) -> Decoded {
    Ok(match i.ast.root.as_str() {
        "bra" => {
            i.ignore(&["uni"]);
            let Operand::Ident(name) = i.operand(0)? else { return i.error("needs a label") };
            let target = i.label(name)?;
            Op::of(OpKind::Jumps(vec![target]), move |_| Flow::Branch(target))
        }
        "brx" => indexed(i)?,
        "call" => return call(i),
        "ret" => {
            i.ignore(&["uni"]);
            Op::of(OpKind::Leaves, |_| Flow::Return)
        }
        "exit" => Op::of(OpKind::Leaves, |_| Flow::Exit),
        "trap" | "brkpt" => Op::of(OpKind::Leaves, |cx| -> Result {
            Err(Fault::new(Check::Explicit, "the kernel executed a trap instruction").lane(cx.first_lane()))
        }),
        "setmaxnreg" => {
            i.ignore(&["sync", "aligned", "u32"]);
            let inc = i.need("a direction", &[("inc", true), ("dec", false)])?;
            let n = i.constant(0)?;
            if !(24..=256).contains(&n) || n % 8 != 0 {
                return i.error(format!("{n} registers: the count is a multiple of 8 from 24 to 256"));
            }
            Op::aligned(move |cx| registers(cx, inc, n))
        }
        "griddepcontrol" => {
            let wait = i.need("an action", &[("wait", true), ("launch_dependents", false)])?;
            Op::new(move |cx| dependency(cx, wait))
        }
        "pmevent" => i.nothing(),
        // Others run first.
        "nanosleep" => {
            i.ignore(&["u32"]);
            Op::new(|_| Flow::Yield)
        }
        // A policy is opaque.
        "createpolicy" => {
            i.ignore_if(|_| true);
            let d = i.dst(0)?;
            Op::new(move |cx| cx.w.regs.w64(d, cx.m, &[0; 32]))
        }
        _ => return cluster_launch(i),
    })
}

/// `brx`: lanes with the index of the first one go, the others try again.
fn indexed(i: &mut Ins<'_>) -> Decoded {
    i.ignore(&["idx", "uni"]);
    let Operand::Ident(list) = i.operand(1)? else { return i.error("needs a list of targets") };
    let Some(Symbol::Targets(names)) = i.names.get(list) else {
        return i.error(format!("`{list}` is no .branchtargets list"));
    };
    let targets = names.iter().map(|n| i.label(n)).collect::<Decoded<Vec<u32>>>()?;
    let index = i.src(0, Type::U32)?;
    Ok(Op::of(OpKind::Jumps(targets.clone()), move |cx| {
        let index = cx.w.regs.r32(index, cx.m);
        let first = index[cx.first_lane() as usize];
        match targets.get(first as usize) {
            Some(target) => Ok(Flow::Some(alike(cx.m, &index, first), *target)),
            None => {
                Err(fault!(Check::Bounds, "brx.idx with index {first}: there are {} targets", targets.len())
                    .lane(cx.first_lane()))
            }
        }
    }))
}

/// The lanes that have this value.
fn alike<T: PartialEq>(m: u32, values: &[T; 32], value: T) -> u32 {
    lanes(m).filter(|&l| values[l] == value).fold(0, |s, l| s | 1 << l)
}

fn cluster_launch(i: &mut Ins<'_>) -> Decoded {
    if i.has("try_cancel") {
        return super::copy::try_cancel(i);
    }
    i.ignore(&["query_cancel", "b128", "b32", "pred", "v4"]);
    let component =
        i.one_of(&[("get_first_ctaid::x", 0), ("get_first_ctaid::y", 1), ("get_first_ctaid::z", 2)]);
    let s = i.src(1, Type::B128)?;
    if i.has("is_canceled") {
        let d = i.dst(0)?;
        return Ok(Op::new(move |cx| {
            let v = cx.w.regs.r128(s, cx.m);
            cx.w.regs.w64(d, cx.m, &v.map(|v| (v != 0).into()));
        }));
    }
    // Components from the first.
    let (d, first) = match component {
        Some(c) => (vec![i.dst(0)?], c),
        None if i.has("get_first_ctaid") => (i.dsts(0)?, 0),
        None => return i.error("needs .try_cancel or .query_cancel"),
    };
    Ok(Op::new(move |cx| {
        let v = cx.w.regs.r128(s, cx.m);
        for (k, d) in (first..).zip(&d) {
            cx.w.regs.w32(*d, cx.m, &v.map(|v| (v >> (32 * k).min(96)) as u32));
        }
    }))
}

/// Offset and size of each parameter of a call.
fn parameters(i: &Ins<'_>, operand: Option<&Operand>) -> Decoded<Vec<Given>> {
    let Some(Operand::Group(list)) = operand else { return Ok(Vec::new()) };
    let one = |o: &Operand| match o {
        Operand::Ident(name) => match i.names.get(name) {
            Some(Symbol::FuncParam { at, bytes }) => Ok((*at, *bytes)),
            _ => i.error(format!("`{name}` is not a .param variable, as arguments and results must be")),
        },
        _ => i.error("arguments and results must be .param variables"),
    };
    list.iter().map(one).collect()
}

fn call(i: &mut Ins<'_>) -> Decoded {
    i.ignore(&["uni"]);
    let operands = &i.ast.operands;
    let first_is_group = matches!(operands.first(), Some(Operand::Group(_)));
    let at = usize::from(first_is_group);
    let returns = parameters(i, if first_is_group { operands.first() } else { None })?;
    let args = parameters(i, operands.get(at + 1))?;
    let Some(Operand::Ident(name)) = operands.get(at) else { return i.error("needs a function") };
    match i.names.get(name) {
        Some(Symbol::Function { callee, .. }) => {
            let callee = *callee;
            Ok(Op::of(OpKind::Calls(returns.clone()), move |cx| enter(cx, callee, &args, &returns)))
        }
        // The prototype or the list of targets that follows the arguments tells ptxas what the simulator sees itself.
        Some(Symbol::Reg(_)) => {
            let target = i.src(at, Type::U64)?;
            Ok(Op::of(OpKind::Calls(returns.clone()), move |cx| indirect(cx, target, &args, &returns)))
        }
        Some(Symbol::Extern(name)) => match name.as_str() {
            "vprintf" => Ok(Op::new(move |cx| vprintf(cx, &args, &returns))),
            "__assertfail" => Ok(Op::new(move |cx| -> Result {
                let lane = cx.first_lane();
                let pointer = param(cx, lane as usize, &args, 0)?;
                let text = string(cx, pointer, lane as usize)?;
                Err(fault!(Check::Explicit, "assertion failed: {text}").lane(lane))
            })),
            _ => i.error(format!(
                "`{name}` is not in the module; the simulator provides vprintf and __assertfail"
            )),
        },
        _ => i.error(format!("`{name}` is neither a function nor a pointer to one")),
    }
}

/// Calls the function that a pointer names.
fn indirect(cx: &mut Cx<'_, '_>, target: Src, args: &[Given], returns: &[Given]) -> Result {
    let pointers = cx.w.regs.r64(target, cx.m);
    cx.defined()?;
    let first = cx.first_lane();
    let pointer = pointers[first as usize];
    let alike = alike(cx.m, &pointers, pointer);
    if alike != cx.m {
        return Ok(Flow::Part(alike));
    }
    let Some(callee) = cx.cl.launch.kernel.callees.iter().position(|c| c.address == pointer) else {
        return Err(
            fault!(Check::Bounds, "a call of {pointer:#x}, which is no function of the module").lane(first)
        );
    };
    if cx.w.is_inside(cx.g.scope, callee as u32) {
        let text = "a function calls itself by a pointer: the simulator runs no recursion";
        return Err(Fault::new(Check::Illegal, text).lane(first));
    }
    enter(cx, callee as u32, args, returns)
}

/// `griddepcontrol`: the launches before have ended already, but only who waits knows.
fn dependency(cx: &mut Cx<'_, '_>, wait: bool) {
    let own = &mut cx.cl.ctas[cx.cta].dependency;
    if !wait {
        if !own.triggered {
            let known = cx.g.known.of(cx.m.trailing_zeros() as usize & 31);
            own.late = known.outside().is_some_and(|o| o.has_waited());
        }
        own.triggered = true;
    } else if !cx.cl.launch.overlaps.is_empty() {
        own.waited = true;
        let waited = cx.cl.eras.waited();
        cx.g.known.join(cx.m, &View::heard(&waited, cx.cl.index));
    }
}

/// Enters a function, with its arguments once all lanes of the group do.
fn enter(cx: &mut Cx<'_, '_>, callee: u32, args: &[Given], returns: &[Given]) -> Result {
    let Callee { params, returns: results, .. } = &cx.cl.launch.kernel.callees[callee as usize];
    let sizes = |list: &[Given]| list.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>();
    let alike = |a: &[Given], b: &[Given]| a.iter().map(|(_, n)| n).eq(b.iter().map(|(_, n)| n));
    if !alike(args, params) || !alike(returns, results) {
        return Err(fault!(
            Check::Illegal,
            "a call with arguments of {:?} bytes and results of {:?}: the function has {:?} and {:?}",
            sizes(args),
            sizes(returns),
            sizes(params),
            sizes(results)
        ));
    }
    if cx.m == cx.g.mask {
        for (&(from, _), &to) in args.iter().zip(params) {
            copy(&mut cx.w.func_params, (cx.m, cx.pc), from, to);
        }
    }
    Ok(Flow::Call(callee))
}

/// Copies a parameter, undefined bytes as well, for the call at `pc`; both lie inside this memory.
fn copy(memory: &mut Local, (m, pc): (u32, u32), from: u32, (to, bytes): Given) {
    for lane in lanes(m) {
        for (from, to) in (u64::from(from)..).zip(u64::from(to)..).take(bytes as usize) {
            let place = Place::FuncParam(from);
            let Ok(&mut [byte]) = memory.slice(lane, from, 1, place) else { return };
            let hole = memory.hole(lane, from, 1, (place, pc));
            if let Ok(target) = memory.slice(lane, to, 1, place) {
                target[0] = byte;
                memory.set_hole(lane, to, 1, hole);
            }
        }
    }
}

/// Copies the results of a function to where its caller wants them, for lanes that return.
pub fn return_values(code: &[Inst], callees: &[Callee], w: &mut Warp, call: usize, m: u32) {
    let at = w.scopes[call].pc - 1;
    if let OpKind::Calls(returns) = &code[at as usize].op.kind
        && let ScopeKind::Call { callee } = w.scopes[call].kind
    {
        for (&to, &(from, _)) in returns.iter().zip(&callees[callee as usize].returns) {
            copy(&mut w.func_params, (m, at), from, to);
        }
    }
}

/// The pointer that is argument `n`.
fn param(cx: &mut Cx<'_, '_>, lane: usize, args: &[Given], n: usize) -> Result<u64> {
    let Some(&(at, _)) = args.get(n) else { return Ok(0) };
    let slice = cx.w.func_params.slice(lane, at.into(), 8, Place::FuncParam(at.into()))?;
    Ok(u64::from_le_bytes(std::array::from_fn(|b| slice[b])))
}

/// A zero-terminated string at a generic address.
fn string(cx: &mut Cx<'_, '_>, mut address: u64, lane: usize) -> Result<String> {
    let mut bytes = Vec::new();
    loop {
        let mut byte = [0];
        cx.read_lane(Space::Generic, address, lane, Kind::READ, &mut byte)?;
        if byte[0] == 0 || bytes.len() > 4096 {
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
        bytes.push(byte[0]);
        address += 1;
    }
}

/// Bytes after which a cluster's output is lost, as a card's is when its buffer is full.
const PRINTED: usize = 1 << 20;
/// The widest field that is printed, and the most digits.
const WIDEST: usize = 4096;

fn vprintf(cx: &mut Cx<'_, '_>, args: &[Given], returns: &[Given]) -> Result<()> {
    for lane in lanes(cx.m) {
        let format = param(cx, lane, args, 0)?;
        let format = string(cx, format, lane)?;
        let mut at = param(cx, lane, args, 1)?;
        let (mut out, mut printed) = (String::new(), 0u32);
        let mut rest = format.chars().peekable();
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut spec = String::new();
            let mut end = None;
            for c in rest.by_ref() {
                if c.is_ascii_alphabetic() && !matches!(c, 'l' | 'h' | 'z') || c == '%' {
                    end = Some(c);
                    break;
                }
                spec.push(c);
            }
            match end {
                Some('%') => out.push('%'),
                Some(end) => {
                    // Varargs: doubles, pointers and long integers take 8 aligned bytes, the rest 4.
                    let wide = spec.contains("ll")
                        || spec.contains('l')
                        || spec.contains('z')
                        || "fFeEgGaAsp".contains(end);
                    let size = if wide { 8 } else { 4 };
                    at = at.wrapping_add(size - 1) & !(size - 1);
                    let mut raw = [0; 8];
                    cx.read_lane(Space::Generic, at, lane, Kind::READ, &mut raw[..size as usize])?;
                    (at, printed) = (at + size, printed + 1);
                    let text = if end == 's' {
                        string(cx, u64::from_le_bytes(raw), lane)?
                    } else {
                        value(end, &spec, raw, wide)
                    };
                    out.push_str(&pad(&spec, text));
                }
                None => {}
            }
        }
        if cx.cl.output.len() < PRINTED {
            cx.cl.output.push_str(&out);
        }
        if let Some(&(to, _)) = returns.first() {
            let place = Place::FuncParam(to.into());
            cx.w.func_params.slice(lane, to.into(), 4, place)?.copy_from_slice(&printed.to_le_bytes());
            cx.w.func_params.set_hole(lane, to.into(), 4, None);
        }
    }
    Ok(())
}

/// One converted argument, without padding.
fn value(end: char, spec: &str, raw: [u8; 8], wide: bool) -> String {
    let bits = u64::from_le_bytes(raw);
    let signed = if wide { bits as i64 } else { i64::from(bits as u32 as i32) };
    let precision =
        spec.split_once('.').and_then(|(_, p)| p.trim_end_matches(['l', 'h']).parse::<usize>().ok());
    let precision = precision.unwrap_or(6).min(WIDEST);
    match end {
        'd' | 'i' => signed.to_string(),
        'u' => bits.to_string(),
        'x' => format!("{bits:x}"),
        'X' => format!("{bits:X}"),
        'o' => format!("{bits:o}"),
        'c' => char::from(bits as u8).to_string(),
        'p' => format!("{bits:#x}"),
        'f' | 'F' => format!("{:.*}", precision, f64::from_bits(bits)),
        'e' | 'E' => format!("{:.*e}", precision, f64::from_bits(bits)),
        _ => f64::from_bits(bits).to_string(),
    }
}

fn pad(spec: &str, text: String) -> String {
    let left = spec.starts_with('-');
    let digits: String =
        spec.trim_start_matches(['-', '+', ' ', '#']).chars().take_while(char::is_ascii_digit).collect();
    let zero = digits.starts_with('0');
    let width = digits.parse().unwrap_or(0).min(WIDEST);
    match (left, zero) {
        (true, _) => format!("{text:<width$}"),
        (false, true) => format!("{text:0>width$}"),
        _ => format!("{text:>width$}"),
    }
}

/// `setmaxnreg`: registers move between a warp and the CTA's pool. Without a known count at entry ptxas ignores
/// the instruction, and so does this.
fn registers(cx: &mut Cx<'_, '_>, inc: bool, n: u32) -> Result {
    let launch = cx.cl.launch;
    let Some(entry) = launch.entry_registers() else { return Ok(Flow::Next) };
    let current = *cx.w.maxnreg.get_or_insert(entry);
    let fault = |text: String| Err(Fault::new(Check::Registers, text));
    let spare = &mut cx.cl.ctas[cx.cta].spare_registers;
    let change = i64::from(n) - i64::from(current);
    match inc {
        true if change < 0 => {
            fault(format!("setmaxnreg.inc to {n}: the warp has {current} registers already"))
        }
        false if change > 0 => fault(format!("setmaxnreg.dec to {n}: the warp has only {current} registers")),
        true if *spare < change * 32 => Ok(Flow::Wait(Wait::Registers(cx.cl.progress))),
        _ => {
            *spare -= change * 32;
            cx.w.maxnreg = Some(n);
            cx.cl.progress += 1;
            Ok(Flow::Next)
        }
    }
}
