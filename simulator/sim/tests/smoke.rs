//! Whole kernels through the public interface: what a first-time user would try.

use dualgemm_device::{Args, Device, LaunchSpec};
use dualgemm_sim::{Config, Gpu};

const SAXPY: &str = include_str!("ptx/saxpy.ptx");

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn saxpy_on_a_grid_with_a_tail_exact() {
    let gpu = Gpu::new(Config::default());
    let n = 1000u32;
    let x: Vec<u8> = (0..n).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let y: Vec<u8> = (0..n).flat_map(|i| (0.5 * i as f32).to_le_bytes()).collect();
    let (dx, dy) = (gpu.alloc(x.len()).unwrap(), gpu.alloc(y.len()).unwrap());
    gpu.copy_to(dx, &x).unwrap();
    gpu.copy_to(dy, &y).unwrap();
    let module = gpu.load(SAXPY).unwrap();
    let f = gpu.function(module, "saxpy").unwrap();
    let args = Args::new().u32(n).f32(2.0).ptr(dx).ptr(dy);
    // SAFETY: the device is simulated and fails a launch that leaves its memory.
    unsafe { gpu.launch(&LaunchSpec::new(f, [8, 1, 1], [128, 1, 1]).args(args)) }.unwrap();
    let mut out = vec![0; y.len()];
    gpu.copy_from(&mut out, dy).unwrap();
    for (i, v) in floats(&out).into_iter().enumerate() {
        assert_eq!(v, 2.5 * i as f32);
    }
}

#[test]
fn a_wrong_argument_is_named_exact() {
    let gpu = Gpu::new(Config::default());
    let module = gpu.load(SAXPY).unwrap();
    let f = gpu.function(module, "saxpy").unwrap();
    let spec = LaunchSpec::new(f, [1, 1, 1], [32, 1, 1]).args(Args::new().u32(1).f64(2.0).u64(0).u64(0));
    assert_eq!(
        // SAFETY: the device is simulated and fails a launch that leaves its memory.
        unsafe { gpu.launch(&spec) }.unwrap_err().to_string(),
        "cannot launch `saxpy`: argument 1 is a f64 of 8 bytes, parameter `a` has 4"
    );
}

#[test]
fn a_register_may_have_the_name_of_the_kernel() {
    let gpu = Gpu::new(Config::default());
    let text = SAXPY.replace("r5", "saxpy").replace(".reg .b32 r<6>;", ".reg .b32 r<5>, saxpy;");
    gpu.load(&text).unwrap();
}

#[test]
fn shared_variables_of_one_name_in_two_scopes_are_two_exact() {
    let gpu = Gpu::new(Config::default());
    let scope = |size, at| {
        format!("{{ .shared .b32 x[{size}]; .reg .b32 r; mov.u32 r, x; st.global.u32 [out+{at}], r; }}")
    };
    let text = format!(
        ".version 8.0 .target sm_80 .address_size 64
         .visible .entry k(.param .u64 out_) {{ .reg .b64 out; ld.param.u64 out, [out_]; {} {} ret; }}",
        scope(4, 0),
        scope(64, 4)
    );
    let kernel = gpu.function(gpu.load(&text).unwrap(), "k").unwrap();
    let out = gpu.alloc(8).unwrap();
    // SAFETY: the device is simulated and fails a launch that leaves its memory.
    unsafe { gpu.launch(&LaunchSpec::new(kernel, [1, 1, 1], [1, 1, 1]).args(Args::new().ptr(out))) }.unwrap();
    let mut bytes = [0; 8];
    gpu.copy_from(&mut bytes, out).unwrap();
    assert_eq!(
        [bytes[..4].try_into(), bytes[4..].try_into()].map(|b| u32::from_le_bytes(b.unwrap())),
        [1024, 1040]
    );
}

#[test]
fn an_unknown_instruction_is_named_with_its_line_exact() {
    let gpu = Gpu::new(Config::default());
    let text = SAXPY.replace("fma.rn.f32 f4, f1, f2, f3;", "wobble.rn.f32 f4, f1;");
    assert_eq!(
        gpu.load(&text).unwrap_err().to_string(),
        "cannot load the PTX: line 25: `wobble.rn.f32`: the simulator does not know this instruction"
    );
    let start = "cannot load the PTX: the simulator has no such form: saxpy, line 25: ";
    let text = SAXPY.replace("fma.rn.f32", "fma.rn.sideways.f32");
    assert_eq!(
        gpu.load(&text).unwrap_err().to_string(),
        format!(
            "{start}`fma.rn.sideways.f32 f4, f1, f2, f3`: no such instruction is known; the nearest forms are: \
             fma.<rn|rz|rm|rp>{{.ftz}}{{.sat}}.f32  d:f32, a:f32, b:f32, c:f32; fma.<rn|rz|rm|rp>{{.ftz}}.f32x2  \
             d:f32x2, a:f32x2!, b:f32x2!, c:f32x2!"
        )
    );
    let text = SAXPY.replace("fma.rn.f32 f4, f1, f2, f3;", "barrier.cluster.wait.relaxed.aligned;");
    let text = text.replace("sm_80", "sm_90a");
    let message = gpu.load(&text).unwrap_err().to_string();
    assert!(
        message.starts_with(&format!("{start}`barrier.cluster.wait.relaxed.aligned`: no such")),
        "{message}"
    );
    let text = SAXPY.replace("fma.rn.f32 f4, f1, f2, f3;", "fma.rn.f32 f4, f1, f2, rd1;");
    assert_eq!(
        gpu.load(&text).unwrap_err().to_string(),
        format!(
            "{start}`fma.rn.f32 f4, f1, f2, rd1`: operand 4 must be `c`: a .f32 register or a number (fma_f32)"
        )
    );
}
