//! An exported submission, run by Python on a driver that writes down what it is asked; the simulator then does what was
//! asked, and C must be that of the task.

use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use dualgemm::formats::ScaleLayout;
use dualgemm::gemm::{AOperand, Epilogue, GateUp, reference};
use dualgemm_bench::Shape;
use dualgemm_bench::challenge::{SEED, first_mismatch, generate};
use dualgemm_bench::inputs::CodeSet;
use dualgemm_device::{Args, Device as _, DevicePtr, LaunchSpec};
use dualgemm_ptx::layout::{
    Interleave, L2Promotion, OutOfBounds, Swizzle, TENSOR_MAP_BYTES, TensorDataType, TensorMap,
};
use dualgemm_sim::{Card, Checks, Config, Gpu};
use half::f16;
use serde_json::Value;

use crate::common::{arg, json};

const SHAPE: Shape = Shape::new(256, 512, 256);

fn numbers<T: TryFrom<u64>>(list: &Value) -> Vec<T>
where
    T::Error: std::fmt::Debug,
{
    list.as_array().unwrap().iter().map(|n| n.as_u64().unwrap().try_into().unwrap()).collect()
}

fn code(value: &Value) -> u8 {
    value.as_u64().unwrap().try_into().unwrap()
}

/// A tensor map from the arguments of `cuTensorMapEncodeTiled`.
fn tensor_map(gpu: &Gpu, call: &Value) -> [u8; TENSOR_MAP_BYTES] {
    let map = TensorMap {
        data_type: TensorDataType::from_code(code(&call[0])).unwrap(),
        address: call[1].as_u64().unwrap(),
        dims: numbers(&call[2]),
        strides: numbers(&call[3]),
        box_dims: numbers(&call[4]),
        element_strides: numbers(&call[5]),
        interleave: Interleave::from_code(code(&call[6])).unwrap(),
        swizzle: Swizzle::from_code(code(&call[7])).unwrap(),
        l2_promotion: L2Promotion::from_code(code(&call[8])).unwrap(),
        out_of_bounds: OutOfBounds::from_code(code(&call[9])).unwrap(),
        im2col: None,
    };
    gpu.tensor_map(&map).unwrap()
}

/// Does what the driver was asked to.
fn replay(gpu: &Gpu, calls: &Value) {
    let modules: Vec<_> = calls["modules"].as_array().unwrap().iter().collect();
    let modules: Vec<_> = modules.iter().map(|text| gpu.load(text.as_str().unwrap()).unwrap()).collect();
    for launch in calls["launches"].as_array().unwrap() {
        let module = modules[launch["module"].as_u64().unwrap() as usize];
        let function = gpu.function(module, launch["name"].as_str().unwrap()).unwrap();
        let size = |name: &str| <[u32; 3]>::try_from(numbers::<u32>(&launch[name])).unwrap();
        let args = launch["args"].as_array().unwrap().iter().fold(Args::new(), |args, given| {
            match given.get("map") {
                Some(index) => {
                    args.tensor_map(tensor_map(gpu, &calls["maps"][index.as_u64().unwrap() as usize]))
                }
                None => {
                    let bytes: Vec<u8> = numbers(&given["bytes"]);
                    let align = bytes.len();
                    args.bytes(&bytes, align)
                }
            }
        });
        let spec = LaunchSpec::new(function, size("grid"), size("block"))
            .cluster(size("cluster"))
            .dynamic_shared(launch["shared"].as_u64().unwrap() as u32)
            .programmatic(launch["programmatic"].as_bool().unwrap())
            .args(args);
        gpu.launch(&spec).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// The calls of a submission, or none where there is no Python.
fn calls(file: &Path, addresses: &[DevicePtr]) -> Option<Value> {
    let driver = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/driver.py");
    let Shape { m, n, k } = SHAPE;
    let numbers = [m as u64, n as u64, k as u64].into_iter().chain(addresses.iter().map(|ptr| ptr.0));
    let mut command = Command::new("python3");
    command.arg(driver).arg(file).args(numbers.map(|n| n.to_string()));
    let output = match command.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        output => output.unwrap(),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn an_exported_submission_computes_the_task() {
    let folder = tempfile::tempdir().unwrap();
    let case = generate(SHAPE, SEED, CodeSet::Full).unwrap();
    let Shape { m, n, k } = SHAPE;
    let weights = GateUp::new(case.b1.clone(), case.b2.clone());
    let want = reference(&Epilogue::default(), &AOperand::Quantized(case.a.clone()), 0..m, &weights);
    for (arch, card) in [("sm_100a", Card::B200), ("sm_90a", Card::H100)] {
        let file = folder.path().join(format!("{arch}.py"));
        let report = json(&["export", "--target", "gpumode", "--arch", arch, "-o", arg(&file)], 0);
        assert_eq!(report["ran_on_silicon"], arch == "sm_90a");
        assert_eq!(report["shapes"].as_array().unwrap().len(), 13);

        let gpu = Gpu::new(Config::default().card(card).checks(Checks::ALL));
        let upload = |bytes: &[u8]| {
            let ptr = gpu.alloc(bytes.len()).unwrap();
            gpu.copy_to(ptr, bytes).unwrap();
            ptr
        };
        let operands = [&case.a, &case.b1, &case.b2];
        let codes = operands.map(|x| upload(x.codes()));
        let scales = operands.map(|x| {
            upload(&x.scale_layout().convert(x.scales(), ScaleLayout::Sf128x4, x.rows(), x.blocks()))
        });
        let (c, scratch) = (gpu.alloc(m * n * 2).unwrap(), gpu.alloc(m * k * 2).unwrap());
        let addresses = [&codes[..], &scales, &[c, scratch]].concat();
        let Some(calls) = calls(&file, &addresses) else {
            println!("no python3 here: what the file does is not tested");
            continue;
        };
        replay(&gpu, &calls);
        let mut bytes = vec![0; m * n * 2];
        gpu.copy_from(&mut bytes, c).unwrap();
        let got: Vec<f16> = bytes.as_chunks().0.iter().copied().map(f16::from_le_bytes).collect();
        assert_eq!(first_mismatch(&got, &want), None, "{arch}");
    }
}
