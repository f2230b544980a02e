//! What both workers share: arguments, operand files and the protocol of `compare.py`.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::Instant;

/// Command line of a worker.
pub struct Job {
    /// Which peer to be.
    pub peer: String,
    /// Operand files.
    pub folder: PathBuf,
    /// Rows of A.
    pub m: usize,
    /// Features.
    pub n: usize,
    /// Elements that are summed.
    pub k: usize,
    /// Weights to rotate through.
    pub cold_bytes: usize,
    /// Threads.
    pub threads: usize,
    /// gate-up, linear or mlp.
    pub op: String,
}

impl Job {
    /// Reads the command line.
    ///
    /// # Panics
    /// If it is not `PEER FOLDER M N K COLD_BYTES THREADS [OP]`.
    pub fn from_args() -> Self {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let [peer, folder, numbers @ ..] = args.as_slice() else { panic!("{USAGE}") };
        let (numbers, op) = numbers.split_at(numbers.len().min(5));
        let numbers: Vec<usize> = numbers.iter().map(|x| x.parse().expect(USAGE)).collect();
        let [m, n, k, cold_bytes, threads] = numbers[..] else { panic!("{USAGE}") };
        let op = op.first().map_or("gate-up", String::as_str).into();
        Self { peer: peer.clone(), folder: folder.into(), m, n, k, cold_bytes, threads, op }
    }

    /// The bytes of an operand file.
    ///
    /// # Panics
    /// If it cannot be read.
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        let path = self.folder.join(name);
        std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    /// The numbers of an operand file.
    ///
    /// # Panics
    /// If it cannot be read.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
        self.bytes(name).chunks_exact(4).map(number).collect()
    }

    /// A of this job.
    pub fn a(&self) -> Vec<f32> {
        self.floats(&format!("{}/a.f32", self.m))
    }

    /// Weights that are rotated through.
    pub fn sets(&self, weights_bytes: usize) -> usize {
        1 + self.cold_bytes / weights_bytes
    }

    /// Writes C once, then takes turns until there are no more.
    ///
    /// # Panics
    /// If C or the answer cannot be written, or a turn is not a number.
    pub fn serve(&self, weights_bytes: usize, mut run: impl FnMut(usize, &mut [f32])) {
        let sets = self.sets(weights_bytes);
        let columns = if self.op == "mlp" { self.k } else { self.n };
        let mut c = vec![0f32; self.m * columns];
        for set in 0..sets {
            run(set, &mut c);
        }
        let bytes: Vec<u8> = c.iter().flat_map(|x| x.to_le_bytes()).collect();
        std::fs::write(self.folder.join(format!("{}/{}.c", self.m, self.peer)), bytes).expect("C is written");
        let mut out = std::io::stdout().lock();
        writeln!(out, "{{\"weights_bytes\": {weights_bytes}, \"sets\": {sets}}}").expect("stdout is open");
        let mut runs = 0;
        let mut timed = || {
            let start = Instant::now();
            run(runs % sets, &mut c);
            runs += 1;
            start.elapsed().as_secs_f64() * 1e6
        };
        for line in std::io::stdin().lock().lines() {
            let budget = line.expect("stdin is open").trim().parse::<f64>().expect("seconds") * 1e6;
            let first = timed();
            let mut times = if first >= budget { vec![first] } else { Vec::new() };
            let mut total: f64 = times.iter().sum();
            while total < budget {
                times.push(timed());
                total += times[times.len() - 1];
            }
            writeln!(out, "{times:?}").expect("stdout is open");
        }
    }
}

const USAGE: &str = "usage: PEER FOLDER M N K COLD_BYTES THREADS [gate-up|linear|mlp]";
