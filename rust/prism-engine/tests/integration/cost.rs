//! Device profiles, and durations computed from them.

use prism_engine::cost::compute::{Work, duration, duration_of};
use prism_engine::cost::durations::Durations;
use prism_engine::cost::kernels::KernelTable;
use prism_engine::cost::names::Pattern;
use prism_engine::graph::op::{ComputeClass, DataType, Provenance};
use prism_engine::ids::NameId;
use prism_engine::profile::{Profile, ProfileError};
use prism_engine::units::SimTime;
use prism_wire::message::CopyDirection;
use proptest::prelude::*;

fn h100() -> Profile {
    Profile::builtin("h100-sxm").expect("built in")
}

/// Seconds of a library call besides its work, and of a wave of tiles besides its products, on `h100-sxm`.
const CALL: f64 = 3.6e-6;
const TILE: f64 = 4200.0 / 1.98e9;
/// Bytes per second of a stream.
const STREAM: f64 = 3.35232e12 * 0.88;

fn gemm(m: u64, n: u64, k: u64, input: DataType, compute: DataType) -> Work {
    Work::Gemm { m, n, k, batch: 1, input, compute }
}

fn time(profile: &Profile, work: &Work) -> SimTime {
    duration(profile, work).0
}

#[test]
fn every_builtin_profile_reads_and_survives_a_round_trip() {
    let names: Vec<_> = Profile::builtin_names().collect();
    assert_eq!(names, ["a100-sxm", "b200-sxm", "gb200-nvl72", "h100-sxm", "h200-sxm", "v100-dgx1"]);
    for name in names {
        let profile = Profile::builtin(name).expect("built in");
        assert_eq!(profile.name, name);
        assert_eq!(Profile::from_toml(&profile.to_toml()).expect("own output"), profile);
    }
}

#[test]
fn memory_clock_and_bus_give_the_memory_bandwidth() {
    for name in Profile::builtin_names() {
        let device = Profile::builtin(name).expect("built in").device;
        let from_clock = u64::from(device.memory_clock_khz) * 1_000 * 2 * u64::from(device.memory_bus_bits) / 8;
        assert_eq!(from_clock, device.memory_bytes_per_s, "{name}");
    }
}

#[test]
fn an_unknown_profile_is_refused_with_the_names_there_are() {
    let error = Profile::builtin("h100").expect_err("the name is h100-sxm").to_string();
    assert!(
        error.contains("`h100`") && error.contains("a100-sxm, b200-sxm, gb200-nvl72, h100-sxm, h200-sxm, v100-dgx1"),
        "{error}"
    );
}

#[test]
fn a_bad_key_is_named() {
    let text = h100().to_toml();
    let unknown = text.replace("sm_count", "sm_cuont");
    let error = Profile::from_toml(&unknown).expect_err("misspelt").to_string();
    assert!(error.contains("sm_cuont"), "{error}");
    let missing = text.lines().filter(|line| !line.starts_with("nics")).collect::<Vec<_>>().join("\n");
    let error = Profile::from_toml(&missing).expect_err("missing").to_string();
    assert!(error.contains("nics"), "{error}");
    let ill_typed = text.replace("gpus = 8", "gpus = \"eight\"");
    assert!(Profile::from_toml(&ill_typed).expect_err("ill-typed").to_string().contains("gpus"));
}

#[test]
fn numbers_out_of_range_are_refused() {
    let change = |from: &str, to: &str| {
        let text = h100().to_toml();
        assert!(text.contains(from), "{from}");
        match Profile::from_toml(&text.replace(from, to)) {
            Err(ProfileError::Range { key, .. }) => key,
            other => panic!("{from} -> {to}: {other:?}"),
        }
    };
    assert_eq!(change("gpus = 8", "gpus = 0"), "node.gpus");
    assert_eq!(change("clock_khz = 1980000", "clock_khz = 0"), "device.clock_khz");
    assert_eq!(change("memory_efficiency = 0.8", "memory_efficiency = 1.5"), "device.memory_efficiency");
    assert_eq!(change("nic_efficiency = 0.96", "nic_efficiency = nan"), "network.nic_efficiency");
    assert_eq!(change("ring_slices_per_step = 2", "ring_slices_per_step = 17"), "network.ring_slices_per_step");
    assert_eq!(change("fp8 = 1979000000000000.0", "fp8 = 0.0"), "device.peak_flops.fp8");
}

#[test]
fn config_text_is_flat() {
    let text = h100().config_text();
    for line in [
        "name=h100-sxm",
        "device.name=NVIDIA H100 80GB HBM3",
        "device.compute_capability=9.0",
        "device.memory_bytes=84942979072",
        "device.peak_flops.bf16=989000000000000.0",
        "host.kernel_launch_ns=4500",
        "node.gpus=8",
    ] {
        assert!(text.lines().any(|other| other == line), "{line} is not in\n{text}");
    }
    assert!(
        text.lines().all(|line| line.split_once('=').is_some_and(|(key, value)| !key.is_empty() && !value.is_empty()))
    );
}

#[test]
fn a_large_matrix_multiplication_runs_at_the_profiled_rate() {
    let profile = h100();
    // Four full waves of 128 x 256 tiles.
    let work = gemm(128 * 132, 256 * 4, 65_536, DataType::Bfloat16, DataType::Float32);
    let seconds = time(&profile, &work).as_ps() as f64 / 1e12 - CALL - 4.0 * TILE;
    let rate = 2.0 * 128.0 * 132.0 * 256.0 * 4.0 * 65_536.0 / seconds;
    assert!((rate / (989e12 * 0.78) - 1.0).abs() < 1e-6, "{rate:e}");
}

#[test]
fn an_extra_wave_costs_what_the_best_tile_leaves_of_it() {
    let profile = h100();
    let full = time(&profile, &gemm(128 * 33, 256 * 4, 65_536, DataType::Bfloat16, DataType::Float32));
    let spilled = time(&profile, &gemm(128 * 34, 256 * 4, 65_536, DataType::Bfloat16, DataType::Float32));
    // 136 tiles of 128 x 256 take two waves of 132; 544 of 128 x 64 take five of a quarter each, at 0.85 of the rate.
    let products = |time: SimTime, waves: f64| time.as_ps() as f64 / 1e12 - CALL - waves * TILE;
    let ratio = products(spilled, 5.0) / products(full, 1.0);
    assert!((ratio - 1.25 / 0.85).abs() < 1e-6, "{ratio}");
}

#[test]
fn a_small_multiplication_cannot_use_the_whole_device() {
    let profile = h100();
    let seconds = |k| time(&profile, &gemm(128, 256, k, DataType::Bfloat16, DataType::Float32)).as_ps() as f64 / 1e12;
    let products = |k: f64| 2.0 * 64.0 * 64.0 * k / (989e12 * 0.78 / 132.0 * 0.7);
    // 8 tiles of 64 x 64: cutting the inner products would cost more than it saves.
    assert!((seconds(1024) / (products(1024.0) + TILE + CALL) - 1.0).abs() < 1e-6);
    // Cut in sixteen, and another wave to sum them up.
    assert!((seconds(16_384) / (products(1024.0) + 2.0 * TILE + CALL) - 1.0).abs() < 1e-6);
}

#[test]
fn unaligned_rows_cost_tf32_half_its_rate() {
    let profile = h100();
    let seconds = |n, compute| time(&profile, &gemm(8192, n, 8192, DataType::Float32, compute)).as_ps() as f64;
    assert!(seconds(8191, DataType::Tf32) / seconds(8192, DataType::Tf32) > 1.9);
    assert!(seconds(8191, DataType::Float32) <= seconds(8192, DataType::Float32));
}

const TABLE: &str = r#"
version = 1
device = "NVIDIA H100 80GB HBM3"
provenance = "measured"
source = "by hand"

[[gemm]]
m = 4096
n = 1024
k = 512
input = "bf16"
ns = 7000

[[operator]]
name = "cudnn.sdpa_forward"
flop = 1000
input = "bf16"
ns = 2500.5

[[kernel]]
name = "void scale<*>(float*, int)"
grid = [10, 1, 1]
threads = 128
ns = 3000
samples = 4

[[kernel]]
name = "copy kernel"
ns = 1000
"#;

fn estimates(table: &str, asked: &[(&str, Work)]) -> Vec<(i64, Provenance)> {
    let table = KernelTable::from_toml(table).expect("a table");
    let mut durations = Durations::new(h100(), table);
    let names = (0..).map(NameId);
    let one = |(id, (name, work)): (NameId, &(&str, Work))| {
        let found = durations.estimate(work, id, || name);
        (found.duration.as_ps(), found.provenance)
    };
    names.zip(asked).map(one).collect()
}

fn launch(grid: [u32; 3], threads_per_block: u32) -> Work {
    Work::Kernel { grid, threads_per_block, bytes: 0 }
}

#[test]
fn a_table_comes_before_the_models() {
    let transposed = gemm(1024, 4096, 512, DataType::Bfloat16, DataType::Float32);
    let sdpa = Work::Operator { flops: 1000, bytes: 1, input: DataType::Bfloat16 };
    let found = estimates(
        TABLE,
        &[
            ("", transposed),
            ("cudnn.sdpa_forward", sdpa),
            ("void scale<1, 2>(float*, int)", launch([10, 1, 1], 128)),
            ("copykernel", launch([77, 2, 1], 32)),
        ],
    );
    let measured = |ps: i64| (ps, Provenance::Measured);
    assert_eq!(found, [7_000_000, 2_500_500, 3_000_000, 1_000_000].map(measured));
}

#[test]
fn what_no_table_knows_is_modelled_or_guessed() {
    let add = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, \
               std::array<char*, 3ul> >(int)";
    let found = estimates(
        TABLE,
        &[
            ("void scale<1, 2>(float*, int)", launch([11, 1, 1], 128)),
            ("void scale<1>(double*, int)", launch([10, 1, 1], 128)),
            (add, launch([65_536, 1, 1], 128)),
            ("", gemm(4096, 1024, 513, DataType::Bfloat16, DataType::Float32)),
        ],
    );
    let provenances: Vec<_> = found.iter().map(|(_, provenance)| *provenance).collect();
    assert_eq!(provenances, [Provenance::Default, Provenance::Default, Provenance::Modelled, Provenance::Modelled]);
    let bytes = 65_536.0 * 128.0 * 8.0 * 3.0 * 2.0 - 0.3 * (h100().device.l2_bytes / 2) as f64;
    assert!((found[2].0 as f64 / 1e12 / (bytes / STREAM + 4200.0 / 1.98e9) - 1.0).abs() < 1e-6);
}

#[test]
fn a_table_that_cannot_be_used_says_why() {
    let fails = |from: &str, to: &str| {
        assert!(TABLE.contains(from), "{from}");
        KernelTable::of_device(&TABLE.replacen(from, to, 1), "NVIDIA H100 80GB HBM3").expect_err(to).to_string()
    };
    assert!(fails("version = 1", "version = 2").contains("version 2"));
    assert!(fails("NVIDIA H100 80GB HBM3", "NVIDIA A100").contains("`NVIDIA A100`"));
    assert!(fails("ns = 7000", "ns = -1").contains("gemm row 1"));
    assert!(fails("ns = 3000", "ns = nan").contains("kernel row 1"));
    assert!(fails("threads = 128\n", "").contains("come together"));
    assert!(fails("input = \"bf16\"", "input = \"bf17\"").contains("bf16, fp16"));
    assert!(fails("samples = 4", "sample = 4").contains("sample"));
    assert!(fails("\"measured\"", "\"guessed\"").contains("guessed"));
}

#[test]
fn the_first_table_that_knows_holds() {
    let mut first = KernelTable::from_toml(TABLE).expect("a table");
    first.extend(KernelTable::from_toml(&TABLE.replace("7000", "9000").replace("k = 512", "k = 64")).expect("a table"));
    let of =
        |k| first.find("", &gemm(4096, 1024, k, DataType::Bfloat16, DataType::Float32)).map(|(time, _)| time.as_ns());
    assert_eq!((of(512), of(64), of(65)), (Some(7000), Some(9000), None));
}

#[test]
fn a_thin_matrix_multiplication_is_bound_by_memory() {
    let profile = h100();
    let seconds = time(&profile, &gemm(1, 16_384, 16_384, DataType::Bfloat16, DataType::Float32)).as_ps() as f64 / 1e12;
    let stream = 2.0 * 16_384.0 * 16_384.0 / STREAM;
    assert!((seconds - CALL - stream).abs() / stream < 1e-3, "{seconds} {stream}");
}

#[test]
fn tf32_is_a_compute_type_of_float32_only() {
    let profile = h100();
    let fp32 = time(&profile, &gemm(8_192, 8_192, 8_192, DataType::Float32, DataType::Float32));
    let tf32 = time(&profile, &gemm(8_192, 8_192, 8_192, DataType::Float32, DataType::Tf32));
    assert!(tf32.as_ps() * 5 < fp32.as_ps());
    let bf16 = |compute| time(&profile, &gemm(8_192, 8_192, 8_192, DataType::Bfloat16, compute));
    assert_eq!(bf16(DataType::Float32), bf16(DataType::Tf32));
}

#[test]
fn kernels_use_known_bytes_before_geometry_and_never_less_than_a_constant() {
    let profile = h100();
    let kernel = |grid, threads_per_block, bytes| time(&profile, &Work::Kernel { grid, threads_per_block, bytes });
    let nothing = kernel([0, 1, 1], 0, 0);
    assert_eq!(nothing.as_ps() / 1000, 2121, "4,200 cycles");
    let by_geometry = kernel([65_536, 16, 1], 128, 0);
    let bytes = 65_536 * 16 * 128 * profile.device.kernel_bytes_per_thread;
    assert_eq!(by_geometry, kernel([132, 16, 1], 128, bytes));
    assert!(by_geometry > kernel([132, 16, 1], 128, bytes / 2));
    let (few, many) = (kernel([1, 1, 1], 128, 1 << 20), kernel([132, 1, 1], 128, 1 << 20));
    assert!(few.as_ps() > 5 * many.as_ps(), "128 threads cannot use the memory's bandwidth: {few:?} {many:?}");
}

#[test]
fn patterns_differ_where_bytes_are_few() {
    let profile = h100();
    let time = |pattern, bytes, threads: u32| {
        duration_of(&profile, &Work::Kernel { grid: [threads / 128, 1, 1], threads_per_block: 128, bytes }, pattern).0
    };
    let (stream, rows) = (Pattern::Stream, Pattern::Rows);
    assert!(time(rows, 1 << 10, 1 << 20) > time(stream, 1 << 10, 1 << 20));
    assert!(time(rows, 1 << 32, 1 << 20).as_ps() as f64 / (time(stream, 1 << 32, 1 << 20).as_ps() as f64) < 1.11);
    assert!(time(Pattern::Gather, 1 << 24, 1 << 12) > time(Pattern::Reduction, 1 << 24, 1 << 12));
}

#[test]
fn the_bytes_of_a_launch_are_at_most_what_its_name_allows() {
    let add = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, \
               std::array<char*, 3ul> >(int)";
    let work = |bytes| Work::Kernel { grid: [65_536, 1, 1], threads_per_block: 128, bytes };
    let found =
        estimates(TABLE, &[(add, work(0)), (add, work(1 << 40)), (add, work(1 << 20)), ("other", work(1 << 40))]);
    assert_eq!(found[0], found[1]);
    assert!(found[2].0 < found[0].0 && found[3].0 > found[0].0);
    assert!(found.iter().all(|(_, provenance)| *provenance == Provenance::Modelled));
}

#[test]
fn bytes_alone_are_no_model_of_a_kernel_that_computes() {
    let work = Work::Kernel { grid: [132, 1, 1], threads_per_block: 384, bytes: 1 << 20 };
    let names = [
        "void cutlass::device_kernel<GemmUniversal>",
        "triton_tem_fused_mm_0",
        "fmha_cutlassF_bf16",
        "triton_red_fused_0",
    ];
    let found = estimates(TABLE, &names.map(|name| (name, work)));
    let provenances = found.iter().map(|(_, provenance)| *provenance);
    assert!(provenances.eq([Provenance::Default, Provenance::Default, Provenance::Default, Provenance::Modelled]));
}

#[test]
fn copies_follow_their_path() {
    let profile = h100();
    let copy = |direction, pinned| time(&profile, &Work::Memcpy { bytes: 1 << 30, direction, pinned });
    let up = copy(CopyDirection::HostToDevice, true);
    assert_eq!(up.as_ns(), ((1_i64 << 30) * 1_000_000_000 + 54_999_999_999) / 55_000_000_000);
    assert_eq!(up, copy(CopyDirection::DeviceToHost, true));
    assert!(copy(CopyDirection::HostToDevice, false) > up);
    assert!(copy(CopyDirection::DeviceToDevice, true) < up);
}

#[test]
fn absurd_work_saturates() {
    let profile = h100();
    let huge = u64::MAX;
    let endless = [
        Work::Kernel { grid: [u32::MAX; 3], threads_per_block: u32::MAX, bytes: 0 },
        Work::Gemm { m: huge, n: huge, k: huge, batch: huge, input: DataType::Float64, compute: DataType::Float64 },
        Work::Operator { flops: huge, bytes: huge, input: DataType::Float16 },
        Work::Memcpy { bytes: huge, direction: CopyDirection::DeviceToDevice, pinned: false },
        Work::Memset { bytes: huge },
    ];
    for work in endless {
        assert!(time(&profile, &work) > SimTime::from_ns(1_000_000_000), "{work:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn more_work_never_takes_less_time(bytes in 0u64..(1 << 36), more in 0u64..(1 << 30), flops in 0u64..(1 << 50)) {
        let profile = h100();
        let operator = |flops, bytes| time(&profile, &Work::Operator { flops, bytes, input: DataType::Bfloat16 });
        prop_assert!(operator(flops, bytes) <= operator(flops, bytes + more));
        prop_assert!(operator(flops, bytes) <= operator(flops + more, bytes));
        let fill = |bytes| duration(&profile, &Work::Memset { bytes });
        prop_assert!(fill(bytes).0 <= fill(bytes + more).0);
        prop_assert_eq!((fill(bytes).1, fill(bytes).2), (ComputeClass::Memset, Provenance::Modelled));
    }

    #[test]
    fn longer_inner_products_take_longer(m in 1u64..9_000, n in 1u64..9_000, k in 1u64..9_000) {
        let profile = h100();
        let work = |k| gemm(m, n, k, DataType::Float8e4m3, DataType::Float32);
        prop_assert!(time(&profile, &work(k)) <= time(&profile, &work(k + 1)));
    }
}
