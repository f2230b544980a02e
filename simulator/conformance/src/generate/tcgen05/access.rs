//! tcgen05.ld and tcgen05.st: every shape and repetition, with and without packing.

use super::layout::{access, cute};
use super::{Entry, MIX, fill, filled, known, registers};
use crate::generate::Draft;

/// The files of loads and stores, and of waiting for both.
pub fn drafts() -> Vec<Draft> {
    let rows: [(&str, &[&str], u32); 4] = [
        ("32x32b", &["32x32b", "16x64b"], 128),
        ("16x128b", &["16x128b"], 64),
        ("16x256b", &["16x256b"], 32),
        ("16x32bx2", &["16x32bx2"], 128),
    ];
    let mut list = Vec::new();
    for (name, shapes, most) in rows {
        let mut samples = Vec::new();
        for shape in shapes {
            for packed in [false, true] {
                for num in (0..8).map(|i| 1 << i).filter(|num| *num <= most) {
                    samples.push(Sample::new(shape, num, packed, samples.len()));
                }
            }
        }
        // The halves of an access apart.
        if name == "16x32bx2" {
            samples.push(Sample { split: 160, ..samples[2].clone() });
            samples.push(Sample { split: 96, ..samples[11].clone() });
        }
        list.push(load(name, &samples));
        list.push(store(name, &samples));
    }
    list.push(waits());
    list
}

#[derive(Clone)]
struct Sample {
    shape: &'static str,
    num: u32,
    packed: bool,
    column: u32,
    /// First lane within those of the warp.
    lane: u32,
    /// Columns from the first half to the second, of `16x32bx2`.
    split: u32,
}

impl Sample {
    fn new(shape: &'static str, num: u32, packed: bool, index: usize) -> Sample {
        let scale = if packed { 2 } else { 1 };
        let lane = if shape != "32x32b" && index % 2 == 1 { 16 } else { 0 };
        let mut sample = Sample { shape, num, packed, column: 0, lane, split: num * scale };
        let room = 512 - sample.columns();
        sample.column = room.min(8 * (index as u32 % 3));
        sample
    }

    fn registers(&self) -> u32 {
        match self.shape {
            "16x128b" => 2 * self.num,
            "16x256b" => 4 * self.num,
            _ => self.num,
        }
    }

    /// Columns from the first to the last that are accessed.
    fn columns(&self) -> u32 {
        let scale = if self.packed { 2 } else { 1 };
        match self.shape {
            "32x32b" => self.num * scale,
            "16x64b" => 2 * self.num * scale,
            "16x128b" => 4 * self.num * scale,
            "16x256b" => 8 * self.num * scale,
            _ => self.split + self.num * scale,
        }
    }

    /// Lane and column of bit `bit` of the registers of `thread`.
    fn place(&self, thread: u32, bit: u32) -> (u32, u32) {
        let (threads, values, row) = access(self.shape, self.num);
        let logical = cute(&threads, thread) + cute(&values, bit);
        let unit = if self.packed { 16 } else { 32 };
        let mut column = logical % row / unit;
        // Which of the two accesses of 16 lanes.
        if self.shape == "16x32bx2" {
            let half = row / 2 / unit;
            column = column % half + column / half * self.split;
        }
        (self.lane + logical / row, self.column + column)
    }

    fn instruction(&self, op: &str) -> String {
        let Sample { shape, num, column, lane, .. } = self;
        let pack = match (self.packed, op) {
            (false, _) => "",
            (_, "ld") => ".pack::16b",
            _ => ".unpack::16b",
        };
        let at = format!("[%tw+{}]", lane << 16 | column);
        let split = if *shape == "16x32bx2" { format!(", {}", self.split) } else { String::new() };
        let list = registers("v", 0, self.registers());
        match op {
            "ld" => format!("tcgen05.ld.sync.aligned.{shape}.x{num}{pack}.b32 {list}, {at}{split};"),
            _ => format!("tcgen05.st.sync.aligned.{shape}.x{num}{pack}.b32 {at}{split}, {list};"),
        }
    }
}

/// Every register of every thread, after tensor memory was filled with words that are all different.
fn load(name: &str, samples: &[Sample]) -> Draft {
    let words: u32 = samples.iter().map(|s| s.registers().next_multiple_of(4)).sum();
    let mut body = format!("mad.wide.u32 %out, %t, {}, %out;\n{}\n", words * 4, fill("FILL", 0, 512));
    let mut expected = vec![0u32; 128 * words as usize];
    let mut first = 0;
    for sample in samples {
        body += &format!("{}\ntcgen05.wait::ld.sync.aligned;\n", sample.instruction("ld"));
        let count = sample.registers();
        for at in (0..count).step_by(4) {
            let n = (count - at).min(4);
            let vector = if n == 1 { String::new() } else { format!(".v{n}") };
            let list = if n == 1 { format!("%v{at}") } else { registers("v", at, n) };
            body += &format!("st.global{vector}.b32 [%out+{}], {list};\n", 4 * (first + at));
        }
        for thread in 0..128 {
            for bit in (0..32 * count).step_by(if sample.packed { 16 } else { 32 }) {
                let (lane, column) = sample.place(thread % 32, bit);
                let word = filled(0, thread / 32 * 32 + lane, column);
                let value = if sample.packed { (word & 0xffff) << (bit % 32) } else { word };
                expected[(thread * words + first + bit / 32) as usize] |= value;
            }
        }
        first += count.next_multiple_of(4);
    }
    let name = format!("tcgen05_ld_{name}");
    known(&name, &name, [(Entry::new(1, "", &body), expected)])
}

/// What lanes hold around and in a store, column by column as the digits of a number to the base 31. Of columns that
/// `.unpack::16b` writes only the low half is defined, so that with it only low halves count.
fn store(name: &str, samples: &[Sample]) -> Draft {
    let words = samples.len() as u32;
    let mut body = format!("mad.wide.u32 %out, %t, {}, %out;\n", words * 4);
    let mut expected = vec![0u32; (128 * words) as usize];
    for (index, sample) in samples.iter().enumerate() {
        let first = sample.column.saturating_sub(8) / 8 * 8;
        let end = (sample.column + sample.columns() + 8).next_multiple_of(8).min(512);
        body += &format!("{}\n", fill(&format!("FILL{index}"), first, end));
        for register in 0..sample.registers() {
            body += &format!(
                "mad.lo.u32 %r4, %t, 128, {register};\nxor.b32 %r4, %r4, 0x5a5a5a5a;\nmul.lo.u32 %v{register}, %r4, {MIX};\n"
            );
        }
        let mask: u32 = if sample.packed { 0xffff } else { u32::MAX };
        body += &format!(
            "{}
             tcgen05.wait::st.sync.aligned;
             mov.u32 %r5, 0;
             mov.u32 %r0, {first};
             READ{index}:
             add.u32 %r1, %tw, %r0;
             tcgen05.ld.sync.aligned.32x32b.x8.b32 {}, [%r1];
             tcgen05.wait::ld.sync.aligned;\n",
            sample.instruction("st"),
            registers("v", 0, 8),
        );
        for i in 0..8 {
            body += &format!("and.b32 %r4, %v{i}, {mask};\nmad.lo.u32 %r5, %r5, 31, %r4;\n");
        }
        body += &format!(
            "add.u32 %r0, %r0, 8;
             setp.lt.u32 %p0, %r0, {end};
             @%p0 bra READ{index};
             st.global.b32 [%out+{}], %r5;\n",
            4 * index
        );
        let mut memory: Vec<Vec<u32>> =
            (0..128).map(|lane| (0..512).map(|column| filled(0, lane, column)).collect()).collect();
        for thread in 0..128u32 {
            for register in 0..sample.registers() {
                let word = ((thread * 128 + register) ^ 0x5a5a_5a5a).wrapping_mul(MIX);
                for half in 0..if sample.packed { 2 } else { 1 } {
                    let (lane, column) = sample.place(thread % 32, 32 * register + 16 * half);
                    let cell = &mut memory[(thread / 32 * 32 + lane) as usize][column as usize];
                    *cell = if sample.packed { word >> (16 * half) & 0xffff } else { word };
                }
            }
        }
        for (lane, row) in memory.iter().enumerate() {
            let digits = row[first as usize..end as usize].iter();
            expected[lane * words as usize + index] =
                digits.fold(0, |h: u32, cell| h.wrapping_mul(31).wrapping_add(cell & mask));
        }
    }
    let name = format!("tcgen05_st_{name}");
    known(&name, &name, [(Entry::new(1, "", &body), expected)])
}

/// A column goes round: loaded, changed, stored over itself and beside itself, with a wait before each use.
fn waits() -> Draft {
    let body = include_str!("../ptx/tcgen05_wait.ptx");
    let mut expected = Vec::new();
    let mut column: Vec<u32> = (0..128).collect();
    for i in 0..8 {
        expected.extend(&column);
        column.iter_mut().for_each(|v| *v = *v * 5 + i);
    }
    known("tcgen05_wait", "tcgen05_wait", [(Entry::new(1, "", body), expected)])
}
