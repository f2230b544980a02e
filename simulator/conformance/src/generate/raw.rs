//! Files written out by hand: head, declarations and body, with the module around them.

use super::{Draft, Known, indented};

/// A module of one kernel `k`.
pub struct Raw {
    /// `family/name`.
    name: String,
    rows: String,
    target: &'static str,
    version: &'static str,
    /// Head lines without `//! `, the launches and their arguments.
    pub head: Vec<String>,
    globals: String,
    pub parameters: String,
    directives: &'static str,
    /// What the kernel executes. `%gid` is the thread's number in the grid, `%tid` is in `%t`, `%out` the address
    /// of parameter `out`.
    body: String,
    expected: Known,
}

impl Raw {
    /// For sm_90a, with one output. The name is `family/name`, rows are separated by spaces.
    pub fn new(name: &str, rows: &str, launch: &str, output: &str) -> Raw {
        Raw {
            name: name.into(),
            rows: rows.into(),
            target: "sm_90a",
            version: "8.6",
            head: vec![format!("launch k {launch}"), format!("out {output} = ?")],
            globals: String::new(),
            parameters: ".param .u64 out".into(),
            directives: "",
            body: String::new(),
            expected: Box::new(Vec::new),
        }
    }

    /// A file of `ptx/`: the lines of the head, then the body.
    pub fn written(name: &str, text: &str) -> Raw {
        let mut head = text.lines().map_while(|line| line.strip_prefix("//! "));
        let rows = head.next().and_then(|line| line.strip_prefix("row ")).unwrap_or_default();
        let head = head.map(String::from).collect();
        let body = text.lines().filter(|line| !line.starts_with("//!")).collect::<Vec<_>>().join("\n");
        Raw { head, body, ..Raw::new(name, rows, "", "") }
    }

    /// Without launches yet: the caller adds them with [`Raw::launch`]. The first line of the head names the origin of the
    /// expected results.
    pub fn of_launches(name: &str, rows: &str, origin: Option<&str>, parameters: String) -> Raw {
        let head =
            origin.map(|from| format!("-- Expected: {from}, not by the simulator.")).into_iter().collect();
        Raw { head, parameters, ..Raw::new(name, rows, "", "") }
    }

    pub fn body(mut self, body: &str) -> Raw {
        self.body = body.into();
        self
    }

    /// With a known result.
    pub fn expects(mut self, outputs: Vec<Vec<u8>>) -> Raw {
        self.expected = Box::new(move || outputs);
        self
    }

    /// With further arguments: head lines and parameters.
    pub fn arguments(mut self, head: &[&str], parameters: &str) -> Raw {
        self.head.extend(head.iter().map(|h| h.to_string()));
        self.parameters = parameters.into();
        self
    }

    /// With module-level text.
    pub fn globals(mut self, text: &str) -> Raw {
        self.globals = text.into();
        self
    }

    pub fn target(mut self, target: &'static str, version: &'static str) -> Raw {
        (self.target, self.version) = (target, version);
        self
    }

    /// With performance directives, a line each.
    pub fn directives(mut self, text: &'static str) -> Raw {
        self.directives = text;
        self
    }

    /// One more launch on a tensor: its line and those of output and input, of the map, a number, numbers that may be
    /// negative.
    pub fn launch(&mut self, launch: &str, out: &str, input: &str, map: String, number: usize, at: &[i64]) {
        let lines = [launch.into(), out.into(), input.into(), map, format!("u32 {number}")];
        self.head.extend(lines);
        self.head.extend(at.iter().map(|&c| format!("u32 {}", c as i32 as u32)));
    }

    /// The file.
    pub fn draft(self) -> Draft {
        let mut text = format!("//! row {}\n", self.rows);
        for line in &self.head {
            text += &format!("//! {line}\n");
        }
        let Raw { version, target, globals, parameters, directives, .. } = self;
        text += &format!(
            ".version {version}\n.target {target}\n.address_size 64\n\n{globals}.visible .entry k({parameters})\n\
             {directives}{{\n{REGISTERS}{}\tret;\n}}\n",
            indented(&self.body)
        );
        Draft { name: self.name, text, expected: self.expected }
    }
}

const REGISTERS: &str = "\
\t.reg .pred %p<8>;
\t.reg .b16 %rs<8>;
\t.reg .b32 %r<64>, %t, %gid, %lane, %warp;
\t.reg .b64 %rd<32>, %out;
\tmov.u32 %t, %tid.x;
\tmov.u32 %r0, %ctaid.x;
\tmov.u32 %r1, %ntid.x;
\tmad.lo.u32 %gid, %r0, %r1, %t;
\tand.b32 %lane, %t, 31;
\tshr.u32 %warp, %t, 5;
\tld.param.u64 %out, [out];
\tmad.wide.u32 %out, %gid, 4, %out;
";
