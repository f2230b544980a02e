//! Texts and launches that would fill memory, never end, or that no assembler or driver takes: each is refused in words.

use dualgemm_device::{Args, Device, LaunchSpec};
use dualgemm_sim::{Card, Config, Gpu};

/// Loads a module and launches its kernel `k`, if it has one, on a grid, CTAs and clusters of these shapes.
fn outcome(text: &str, [grid, block, cluster]: [[u32; 3]; 3]) -> Result<String, dualgemm_device::Error> {
    let card = if text.contains("sm_100a") { Card::B200 } else { Card::H100 };
    let gpu = Gpu::new(Config { max_instructions: 10_000, ..Config::default().card(card) });
    let kernel = gpu.function(gpu.load(text)?, "k")?;
    let spec = LaunchSpec::new(kernel, grid, block).cluster(cluster).args(Args::new());
    // SAFETY: the device is simulated and fails a launch that leaves its memory.
    unsafe { gpu.launch(&spec) }?;
    Ok(gpu.take_outcome().map(|outcome| outcome.output).unwrap_or_default())
}

const ONE: [u32; 3] = [1, 1, 1];
const HEAD: &str = ".version 8.7 .target sm_90a .address_size 64\n";

#[test]
fn declarations_that_nothing_holds_are_refused() {
    let many: String =
        (0..9).map(|i| format!(".reg .b32 {}<30000>;", ["a", "b", "c"][i / 3].repeat(i + 1))).collect();
    for (module, body, says) in [
        ("", ".reg .b32 r<4000000000>;", "a kernel can declare 262144 registers here"),
        ("", &many, "a kernel can declare 262144 registers here"),
        (
            "",
            ".local .b8 x[2000000000];",
            "with it, 2000000000 bytes are more than a kernel can have there, 524288",
        ),
        ("", ".local .b8 x[18446744073709551615];", "524288"),
        ("", ".shared .b8 a[40000]; .shared .b8 b[9153];", "`b`: with it, 49153 bytes"),
        ("", ".shared .b8 a[4294967295]; .shared .b8 b[4294967295];", "`a`: with it, 4294967295 bytes"),
        ("", ".param .b8 p[4294967295]; .param .b8 q[4294967295];", "`p`: with it, 4294967295 bytes"),
        (".const .b8 c[1152921504606846976];", "", "1152921504606846976 bytes are more than"),
        (".const .b8 a[65536]; .const .b8 b[1];", "", "`b`: with it, 65537 bytes"),
        (".global .b8 g[90000000000];", "", "its 90000000000 bytes do not fit in memory"),
    ] {
        let text = format!("{HEAD}{module}\n.visible .entry k() {{ {body} ret; }}");
        let found = outcome(&text, [ONE; 3]).unwrap_err().to_string();
        assert!(found.contains(says), "{body}{module}: {found}");
    }
    let text = format!("{HEAD}.visible .entry k(.param .b8 p[32765]) {{ ret; }}");
    assert!(outcome(&text, [ONE; 3]).unwrap_err().to_string().contains("32765 bytes are more than"));
    // A large variable costs what is touched of it.
    let body = ".shared .b8 a[40000]; .shared .b8 b[9152];";
    let text = format!("{HEAD}.global .b8 g[70000000000] = {{1}};\n.visible .entry k() {{ {body} ret; }}");
    let large = outcome(&text, [ONE; 3]).map_err(|e| e.to_string());
    assert!(large.is_ok() || large.unwrap_err().contains("bytes do not fit in memory"));
}

#[test]
fn shapes_that_no_card_launches_are_refused() {
    let kernel = |directives: &str| format!("{HEAD}.visible .entry k() {directives} {{ ret; }}");
    for (directives, shapes, says) in [
        ("", [[65536, 65536, 1], ONE, ONE], "a grid of [65536, 65536, 1] CTAs: 65535 are allowed in y and z"),
        ("", [[1 << 31, 1, 1], ONE, ONE], "and 2147483647 are simulated"),
        ("", [ONE, [1, 1, 65], ONE], "a CTA of [1, 1, 65] threads: 1 to 1024 are allowed, 64 in z"),
        ("", [ONE, [65536, 65536, 2], ONE], "1 to 1024 are allowed"),
        (
            "",
            [[65536, 65536, 1], ONE, [65536, 65536, 1]],
            "a cluster of 4294967296 CTAs: 1 to 16 are allowed",
        ),
        (".reqnctapercluster 65536, 65536, 2", [ONE; 3], "1 to 16 are allowed"),
        (".reqntid 65536, 65536, 65536", [ONE; 3], "the kernel declares .reqntid"),
    ] {
        let found = outcome(&kernel(directives), shapes).unwrap_err().to_string();
        assert!(found.contains(says), "{directives} {shapes:?}: {found}");
    }
    // Registers at entry follow from what is declared.
    for directives in [".maxntid 65536, 65536, 65536 .minnctapersm 1", ".maxntid 128 .minnctapersm 0"] {
        let text = kernel(directives).replace("ret;", "setmaxnreg.dec.sync.aligned.u32 24; ret;");
        outcome(&text, [ONE, [128, 1, 1], ONE]).unwrap();
    }
}

#[test]
fn calls_take_no_longer_than_their_number() {
    // Two functions on each of 40 floors, each of which calls both of the next.
    let pair = |i: usize| {
        let calls = if i < 39 { format!("call a{0}; call b{0};", i + 1) } else { String::new() };
        format!(".func a{i}() {{ {calls} ret; }}\n.func b{i}() {{ {calls} ret; }}\n")
    };
    let floors: String = (0..40).rev().map(pair).collect();
    let text = format!(
        "{HEAD}{floors}.visible .entry k() {{ .reg .pred p; setp.ne.u32 p, 0, 0; @p call a0; ret; }}"
    );
    outcome(&text, [ONE; 3]).unwrap();
    // A chain that is deeper than a stack.
    let link = |i| format!(".func f{}() {{ call f{i}; ret; }}\n", i + 1);
    let chain: String = (0..4000).map(link).collect();
    let text = format!("{HEAD}.func f0() {{ ret; }}\n{chain}.visible .entry k() {{ call f4000; ret; }}");
    outcome(&text, [ONE; 3]).unwrap();
}

#[test]
fn arguments_are_those_of_the_function() {
    let call = |declared: &str, arguments: &str| {
        let text = format!(
            "{HEAD}.func (.param .b32 y) f(.param .b32 x) {{ .reg .b32 r; ld.param.b32 r, [x]; st.param.b32 [y], r; ret; }}
             .visible .entry k() {{ .param .b32 q; {declared} call {arguments}; ret; }}"
        );
        outcome(&text, [ONE; 3]).map_err(|e| e.to_string())
    };
    let p = ".param .b32 p; st.param.b32 [p], 7;";
    call(p, "(q), f, (p)").unwrap();
    let says = "a call with arguments of [4, 4] bytes and results of [4]: the function has [4] and [4]";
    assert!(call(p, "(q), f, (p, p)").unwrap_err().contains(says));
    assert!(call(p, "(q), f").unwrap_err().contains("arguments of [] bytes"));
    assert!(call(p, "f, (p)").unwrap_err().contains("results of []"));
    assert!(call(".param .b64 p;", "(q), f, (p)").unwrap_err().contains("arguments of [8] bytes"));
}

#[test]
fn printed_fields_and_pointers_are_bounded() {
    let print = |format: &str, arguments: &str| {
        let bytes: Vec<String> = format.bytes().chain([0]).map(|b| b.to_string()).collect();
        let text = format!(
            "{HEAD}.extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);
             .global .b8 text[{}] = {{{}}};
             .visible .entry k() {{
                 .reg .b64 a; .param .b64 f; .param .b64 v; .param .b32 r;
                 mov.u64 a, text; st.param.b64 [f], a;
                 st.param.b64 [v], {arguments};
                 call (r), vprintf, (f, v);
                 ret;
             }}",
            bytes.len(),
            bytes.join(", ")
        );
        outcome(&text, [ONE; 3]).map_err(|e| e.to_string())
    };
    assert_eq!(print("%%", "0").unwrap(), "%");
    assert!(print("%9999999999d", "a").unwrap().len() >= 4096);
    assert_eq!(print("%99999d", "a").unwrap().len(), 4096);
    assert!(print("%.99999f", "a").unwrap().len() >= 4096);
    assert!(print("%f", "-3").unwrap_err().contains("out of bounds"));
}

#[test]
fn names_of_special_registers_are_known() {
    let read = |name: &str| {
        let text = format!("{HEAD}.visible .entry k() {{ .reg .b32 r; mov.u32 r, {name}; ret; }}");
        outcome(&text, [ONE; 3]).is_ok()
    };
    assert!(read("%tid.x") && read("%ntid.w") && read("%envreg31"));
    assert!(!read("%nonsense.w") && !read("%tid.q") && !read("%tidy"));
}

#[test]
fn constants_that_no_operand_has_are_refused() {
    let refused = |instruction: &str| {
        let text = format!(
            ".version 8.7 .target sm_100a .address_size 64
             .visible .entry k() {{ .reg .b32 r; .reg .b64 a; {instruction}; ret; }}"
        );
        outcome(&text, [ONE, [32, 1, 1], ONE]).unwrap_err().to_string()
    };
    let split = refused("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {r}, [r], 4294967295");
    assert!(split.contains("the second half is 4294967295 columns behind: there are 512"), "{split}");
    let truncated = refused("cp.async.ca.shared.global [r], [a], 4294967300");
    assert!(truncated.contains("a constant of 32 bits") || truncated.contains("4294967300"), "{truncated}");
}
