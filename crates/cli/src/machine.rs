//! What the operating system says about this machine. Linux files, read where they exist; elsewhere unknown.

use std::fs;
use std::path::Path;

use serde::Serialize;

/// What was built: the commit, if the build was told of it by `DUALGEMM_COMMIT`, otherwise the version.
pub const COMMIT: &str = match option_env!("DUALGEMM_COMMIT") {
    Some(commit) => commit,
    None => env!("CARGO_PKG_VERSION"),
};

const GIB: f64 = (1u64 << 30) as f64;

/// Processor and memory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Processor model, `unknown` where the system does not say.
    pub cpu_model: String,
    /// Architecture that this program was built for.
    pub arch: &'static str,
    /// Threads that can run at once, as this process is allowed.
    pub threads: usize,
    /// Memory installed, bytes.
    pub memory_bytes: Option<u64>,
    /// Memory that can be had now without swapping, bytes.
    pub memory_available_bytes: Option<u64>,
    /// Nodes, in the order of their numbers; empty where the system does not say.
    pub nodes: Vec<Node>,
}

/// Processors, and memory that they reach faster than that of other nodes (NUMA).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Node {
    /// Its number.
    pub node: usize,
    /// The numbers of its processors, in Linux's form: `0-15,32-47`.
    pub processors: String,
    /// Memory installed, bytes.
    pub memory_bytes: Option<u64>,
}

impl Node {
    /// Asks the system, whose folder for nodes this is.
    fn all(folder: &Path) -> Vec<Self> {
        let node = |entry: std::io::Result<fs::DirEntry>| {
            let path = entry.ok()?.path();
            let node = path.file_name()?.to_str()?.strip_prefix("node")?.parse().ok()?;
            let text = |file: &str| fs::read_to_string(path.join(file)).unwrap_or_default();
            let memory_bytes = kilobytes(&text("meminfo"), &format!("Node {node} MemTotal"));
            Some(Self { node, processors: text("cpulist").trim().into(), memory_bytes })
        };
        let mut nodes: Vec<_> = fs::read_dir(folder).into_iter().flatten().filter_map(node).collect();
        nodes.sort_by_key(|node| node.node);
        nodes
    }
}

impl Machine {
    /// Asks the system.
    pub fn detect() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Self {
            cpu_model: fs::read_to_string("/proc/cpuinfo")
                .ok()
                .and_then(|text| field(&text, "model name").or_else(|| arm_model(&text)))
                .unwrap_or_else(|| "unknown".into()),
            arch: std::env::consts::ARCH,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kilobytes(&meminfo, "MemTotal"),
            memory_available_bytes: kilobytes(&meminfo, "MemAvailable"),
            nodes: Node::all(Path::new("/sys/devices/system/node")),
        }
    }
}

/// The largest amount of memory that this process has held at once, bytes.
pub fn peak_rss() -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM")
}

/// Whether the system would ever give so many bytes of memory: an allocation that cannot be had ends the process without a
/// word from it.
pub fn has_room(bytes: f64) -> bool {
    // A conversion from floats that are too large gives the largest integer, for which there is no memory.
    Vec::<u8>::new().try_reserve_exact(bytes as usize).is_ok()
}

/// Refuses work for which there is no memory. `what` names the argument that asks for so much.
pub fn fits(bytes: f64, what: impl FnOnce() -> String) -> anyhow::Result<()> {
    if !has_room(bytes) {
        anyhow::bail!(
            "{}: takes {:.1} GiB, which do not fit the memory; less is needed",
            what(),
            bytes / GIB
        );
    }
    Ok(())
}

/// The value of the first `key : value` line.
fn field(text: &str, key: &str) -> Option<String> {
    let value = |line: &str| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim().to_string())
    };
    text.lines().find_map(value)
}

/// The model where Linux has numbers instead of its name, on ARM64: those of the register MIDR_EL1. Names are from Linux's
/// `arch/arm64/include/asm/cputype.h`.
fn arm_model(cpuinfo: &str) -> Option<String> {
    let [implementer, part] = ["CPU implementer", "CPU part"].map(|key| field(cpuinfo, key));
    let (implementer, part) = (implementer?, part?);
    let name = match (implementer.as_str(), part.as_str()) {
        ("0x41", "0xd08") => "ARM Cortex-A72",
        ("0x41", "0xd0c") => "ARM Neoverse N1",
        ("0x41", "0xd40") => "ARM Neoverse V1",
        ("0x41", "0xd49") => "ARM Neoverse N2",
        ("0x41", "0xd4f") => "ARM Neoverse V2",
        _ => return Some(format!("implementer {implementer}, part {part}")),
    };
    Some(name.into())
}

fn kilobytes(text: &str, key: &str) -> Option<u64> {
    field(text, key)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_memory_holds_is_refused() {
        assert!(fits(1e6, || "a".into()).is_ok());
        for bytes in [1e18, 1e30, f64::INFINITY] {
            let message = fits(bytes, || "--shapes 1x2x3".into()).unwrap_err().to_string();
            assert!(
                message.starts_with("--shapes 1x2x3: takes ") && message.contains("do not fit"),
                "{message}"
            );
        }
    }

    #[test]
    fn nodes_are_read_as_linux_writes_them() {
        let folder = tempfile::tempdir().unwrap();
        for (node, processors) in [(10, "8-15\n"), (2, "0-7\n"), (3, "\n")] {
            let at = folder.path().join(format!("node{node}"));
            fs::create_dir(&at).unwrap();
            fs::write(at.join("cpulist"), processors).unwrap();
            let meminfo = format!("Node {node} MemTotal:       {node} kB\nNode {node} MemFree:  1 kB\n");
            fs::write(at.join("meminfo"), meminfo).unwrap();
        }
        fs::remove_file(folder.path().join("node3/meminfo")).unwrap();
        fs::write(folder.path().join("online"), "2-3,10\n").unwrap();
        let node =
            |node, processors: &str, memory_bytes| Node { node, processors: processors.into(), memory_bytes };
        let want = [node(2, "0-7", Some(2048)), node(3, "", None), node(10, "8-15", Some(10240))];
        assert_eq!(Node::all(folder.path()), want);
        assert_eq!(Node::all(&folder.path().join("none")), []);
    }

    #[test]
    fn proc_files_are_read_as_written() {
        let text = "MemTotal:       24602956 kB\nMemFree: x kB\nmodel name\t: AMD EPYC\n";
        assert_eq!(kilobytes(text, "MemTotal"), Some(24602956 * 1024));
        assert_eq!([kilobytes(text, "MemFree"), kilobytes(text, "Swap")], [None, None]);
        assert_eq!(field(text, "model name").as_deref(), Some("AMD EPYC"));
        assert_eq!(arm_model(text), None);
        let arm = |part| arm_model(&format!("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: {part}\n"));
        assert_eq!(arm("0xd4f").as_deref(), Some("ARM Neoverse V2"));
        assert_eq!(arm("0xfff").as_deref(), Some("implementer 0x41, part 0xfff"));
    }
}
