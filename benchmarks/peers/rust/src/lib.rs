//! What both workers share: arguments, operand files and the protocol of `compare.py`.

use std::fs::File;
use std::io::{BufRead, Write};
use std::os::unix::fs::FileExt;
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
    /// gate-up, linear, mlp or moe.
    pub op: String,
    /// Of a mixture: its experts.
    pub experts: usize,
    /// Experts of each row.
    pub top_k: usize,
}

impl Job {
    /// Reads the command line.
    ///
    /// # Panics
    /// If it is not `PEER FOLDER M N K COLD_BYTES THREADS OP EXPERTS TOP_K`.
    pub fn from_args() -> Self {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let [peer, folder, m, n, k, cold_bytes, threads, op, experts, top_k] = args.as_slice() else {
            panic!("usage: PEER FOLDER M N K COLD_BYTES THREADS OP EXPERTS TOP_K")
        };
        let number = |text: &String| text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
        let [m, n, k, cold_bytes, threads] = [m, n, k, cold_bytes, threads].map(number);
        let [experts, top_k] = [experts, top_k].map(number);
        let (peer, folder, op) = (peer.clone(), folder.into(), op.clone());
        Self { peer, folder, m, n, k, cold_bytes, threads, op, experts, top_k }
    }

    /// `len` bytes of an operand file, with `at` times as many before them.
    ///
    /// # Panics
    /// If they cannot be read.
    pub fn part(&self, name: &str, at: usize, len: usize) -> Vec<u8> {
        let (path, mut bytes) = (self.folder.join(name), vec![0; len]);
        File::open(&path)
            .and_then(|file| file.read_exact_at(&mut bytes, (at * len) as u64))
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        bytes
    }

    /// `count` numbers of an operand file.
    ///
    /// # Panics
    /// If they cannot be read.
    pub fn numbers<T>(&self, name: &str, count: usize, from_le_bytes: fn([u8; 4]) -> T) -> Vec<T> {
        let number = |bytes: &[u8]| from_le_bytes(bytes.try_into().expect("four bytes"));
        self.part(name, 0, 4 * count).chunks_exact(4).map(number).collect()
    }

    /// A of this job.
    pub fn a(&self) -> Vec<f32> {
        self.numbers(&format!("{}/a.f32", self.m), self.m * self.k, f32::from_le_bytes)
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
        let columns = if matches!(self.op.as_str(), "mlp" | "moe") { self.k } else { self.n };
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
