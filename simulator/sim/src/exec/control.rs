//! Control flow, traps, calls, register reallocation.

use super::*;
use crate::check::order::View;
use crate::decode::Op;
use crate::decode::control::{Builtin, Control};
use crate::machine::warp::{ScopeKind, Warp};
use crate::memory::local::Local;
use crate::program::{Callee, Inst};

pub fn execute(op: &Control, cx: &mut Cx<'_, '_>) -> Result {
    let m = cx.m;
    match op {
        Control::Indexed { index, targets } => {
            let index = cx.w.regs.r32(*index, m);
            let first = cx.first_lane() as usize;
            let same = lanes(m).filter(|&l| index[l] == index[first]).fold(0, |s, l| s | 1 << l);
            match targets.get(index[first] as usize) {
                Some(target) => Ok(Flow::Some(same, *target)),
                None => Err(Fault::new(
                    Check::Bounds,
                    format!("brx.idx with index {}: there are {} targets", index[first], targets.len()),
                )
                .lane(first as u32)),
            }
        }
        Control::Call { callee, args, .. } => Ok(call(cx, *callee, args)),
        Control::Indirect { target, args, .. } => {
            let pointers = cx.w.regs.r64(*target, m);
            if cx.w.regs.bad.is_some() {
                return Ok(Flow::Next);
            }
            let first = cx.first_lane();
            let pointer = pointers[first as usize];
            let alike = lanes(m).filter(|&l| pointers[l] == pointer).fold(0, |s, l| s | 1 << l);
            if alike != m {
                return Ok(Flow::Part(alike));
            }
            let Some(callee) = cx.cl.launch.kernel.callees.iter().position(|c| c.address == pointer) else {
                let text = format!("a call of {pointer:#x}, which is no function of the module");
                return Err(Fault::new(Check::Bounds, text).lane(first));
            };
            if cx.w.is_inside(cx.g.scope, callee as u32) {
                let text = "a function calls itself by a pointer: the simulator runs no recursion";
                return Err(Fault::new(Check::Illegal, text).lane(first));
            }
            Ok(call(cx, callee as u32, args))
        }
        Control::Builtin(Builtin::Vprintf, args, returns) => vprintf(cx, args, returns),
        Control::Builtin(Builtin::Assertfail, args, _) => {
            let lane = cx.first_lane();
            let pointer = param(cx, lane as usize, args, 0, 8)?;
            let text = string(cx, pointer, lane as usize)?;
            Err(Fault::new(Check::Explicit, format!("assertion failed: {text}")).lane(lane))
        }
        Control::Return => Ok(Flow::Return),
        Control::Exit => Ok(Flow::Exit),
        Control::Trap => {
            Err(Fault::new(Check::Explicit, "the kernel executed a trap instruction").lane(cx.first_lane()))
        }
        Control::Registers(inc, n) => registers(cx, *inc, *n),
        Control::Policy(d) => {
            cx.w.regs.w64(*d, m, &[0; 32]);
            Ok(Flow::Next)
        }
        Control::Dependency(wait) => {
            dependency(cx, *wait);
            Ok(Flow::Next)
        }
        Control::Sleep => Ok(Flow::Yield),
        Control::IsCanceled(d, s) => {
            let v = cx.w.regs.r128(*s, m);
            let p = (0..32).fold(0, |p, i| p | u32::from(v[i] != 0) << i);
            cx.w.regs.wpred(*d, m, p);
            Ok(Flow::Next)
        }
        Control::FirstCta(d, first, s) => {
            let v = cx.w.regs.r128(*s, m);
            for (k, d) in d.iter().enumerate() {
                let shift = 32 * (*first as usize + k);
                cx.w.regs.w32(*d, m, &v.map(|v| (v >> shift.min(96)) as u32));
            }
            Ok(Flow::Next)
        }
    }
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
fn call(cx: &mut Cx<'_, '_>, callee: u32, args: &[u32]) -> Flow {
    if cx.m == cx.g.mask {
        let params = &cx.cl.launch.kernel.callees[callee as usize].params;
        for (&from, &(to, bytes)) in args.iter().zip(params) {
            copy(&mut cx.w.func_params, cx.m, from, to, bytes);
        }
    }
    Flow::Call(callee)
}

fn copy(memory: &mut Local, m: u32, from: u32, to: u32, bytes: u32) {
    for lane in lanes(m) {
        let place = Place::FuncParam(from.into());
        // Offsets were laid out by the linker inside this memory.
        let Ok(source) = memory.slice(lane, from.into(), bytes as usize, place) else { continue };
        let source = source.to_vec();
        if let Ok(target) = memory.slice(lane, to.into(), bytes as usize, place) {
            target.copy_from_slice(&source);
            for byte in 0..u64::from(bytes) {
                let hole = memory.hole(lane, u64::from(from) + byte, 1);
                memory.set_hole(lane, u64::from(to) + byte, 1, hole);
            }
        }
    }
}

/// Copies the results of a function to where its caller wants them, for lanes that return.
pub fn return_values(code: &[Inst], callees: &[Callee], w: &mut Warp, call: usize, m: u32) {
    let at = w.scopes[call].pc - 1;
    if let Op::Control(Control::Call { returns, .. } | Control::Indirect { returns, .. }) =
        &code[at as usize].op
        && let ScopeKind::Call { callee } = w.scopes[call].kind
    {
        for (&to, &(from, bytes)) in returns.iter().zip(&callees[callee as usize].returns) {
            copy(&mut w.func_params, m, from, to, bytes);
        }
    }
}

fn param(cx: &mut Cx<'_, '_>, lane: usize, args: &[u32], n: usize, bytes: usize) -> Result<u64> {
    let Some(&at) = args.get(n) else { return Ok(0) };
    let slice = cx.w.func_params.slice(lane, at.into(), bytes, Place::FuncParam(at.into()))?;
    let mut value = [0; 8];
    value[..bytes].copy_from_slice(slice);
    Ok(u64::from_le_bytes(value))
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

fn vprintf(cx: &mut Cx<'_, '_>, args: &[u32], returns: &[u32]) -> Result {
    for lane in lanes(cx.m) {
        let format = param(cx, lane, args, 0, 8)?;
        let format = string(cx, format, lane)?;
        let mut at = param(cx, lane, args, 1, 8)?;
        let mut out = String::new();
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
                    at = at.next_multiple_of(size);
                    let mut raw = [0; 8];
                    cx.read_lane(Space::Generic, at, lane, Kind::READ, &mut raw[..size as usize])?;
                    at += size;
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
        cx.cl.output.push_str(&out);
        if let Some(&to) = returns.first() {
            let place = Place::FuncParam(to.into());
            cx.w.func_params.slice(lane, to.into(), 4, place)?.copy_from_slice(&1u32.to_le_bytes());
        }
    }
    Ok(Flow::Next)
}

/// One converted argument, without padding.
fn value(end: char, spec: &str, raw: [u8; 8], wide: bool) -> String {
    let bits = u64::from_le_bytes(raw);
    let signed = if wide { bits as i64 } else { i64::from(bits as u32 as i32) };
    let precision =
        spec.split_once('.').and_then(|(_, p)| p.trim_end_matches(['l', 'h']).parse::<usize>().ok());
    match end {
        'd' | 'i' => signed.to_string(),
        'u' => bits.to_string(),
        'x' => format!("{bits:x}"),
        'X' => format!("{bits:X}"),
        'o' => format!("{bits:o}"),
        'c' => char::from(bits as u8).to_string(),
        'p' => format!("{bits:#x}"),
        'f' | 'F' => format!("{:.*}", precision.unwrap_or(6), f64::from_bits(bits)),
        'e' | 'E' => format!("{:.*e}", precision.unwrap_or(6), f64::from_bits(bits)),
        _ => f64::from_bits(bits).to_string(),
    }
}

fn pad(spec: &str, text: String) -> String {
    let left = spec.starts_with('-');
    let digits: String =
        spec.trim_start_matches(['-', '+', ' ', '#']).chars().take_while(char::is_ascii_digit).collect();
    let zero = digits.starts_with('0');
    let width: usize = digits.parse().unwrap_or(0);
    match (left, zero) {
        (true, _) => format!("{text:<width$}"),
        (false, true) => format!("{text:0>width$}"),
        _ => format!("{text:>width$}"),
    }
}

/// `setmaxnreg`: registers move between a warp and the CTA's pool. Without a known count at entry ptxas ignores
/// the instruction, and so does this.
fn registers(cx: &mut Cx<'_, '_>, inc: bool, n: u32) -> Result {
    if let Some(flow) = cx.aligned()? {
        return Ok(flow);
    }
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
