//! Workloads of SimAI.

use crate::support::shared;
use prism_engine::graph::Graph;
use prism_engine::ids::{CommId, Rank};
use prism_engine::profile::Profile;
use prism_engine::replay::{ReplayOptions, replay};
use prism_import::simai::{Options, Summary, import};
use std::sync::Arc;

fn import_text(text: &str, options: &Options) -> Result<(Graph, Summary), String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.txt");
    std::fs::write(&path, text).unwrap();
    import(&path, options).map_err(|error| error.to_string())
}

fn time(graph: Graph) -> i64 {
    let graph = Arc::new(graph);
    let options = ReplayOptions::new(Profile::from_toml(&graph.meta()["profile"]).unwrap());
    replay(&graph, &options).unwrap().iteration_time_ns.iter().sum()
}

fn of(world_size: u32) -> Options {
    Options { world_size: Some(world_size), ..Options::default() }
}

#[test]
fn every_workload_of_the_collection_is_read_with_all_its_collectives() {
    let cases = [
        ("micro_test__all_gather", 16),
        ("micro_test__all_reduce", 16),
        ("micro_test__all_to_all", 16),
        ("micro_test__muti_all_reduce", 16),
        ("model_workload__G13B-M1-C01_GPT13B_megatron_tp8_pp1_mbs1_A100", 64),
        ("model_workload__G175B-M1-C03_GPT175B_megatron_tp8_pp1_mbs1_A100", 64),
        ("model_workload__L65B-M1-C05_Llama65B_megatron_tp8_pp1_mbs1_A100", 64),
        ("model_workload__L7B-D1-C02_Llama7B_deepspeed_zero3_A100", 64),
        ("model_workload__L7B-M1-C04_Llama7B_megatron_tp2_pp1_mbs1_A100", 64),
    ];
    for (name, world_size) in cases {
        let Some(path) = shared(&format!("traces/aicb/workload__simAI__{name}.txt")) else { return };
        match import(&path, &of(world_size)) {
            Ok((graph, summary)) => {
                let text = std::fs::read_to_string(&path).unwrap();
                let kinds = ["ALLREDUCE", "ALLGATHER", "REDUCESCATTER", "ALLTOALL", "BROADCAST"];
                let calls: usize = kinds.iter().map(|kind| text.matches(kind).count()).sum();
                assert_eq!(summary.collectives, calls as u64, "{name}");
                assert!(time(graph) > 0);
            }
            // Some files of the collection announce more layers than they have.
            Err(error) => assert!(error.to_string().contains("layers are announced"), "{name}: {error}"),
        }
    }
}

#[test]
fn sim_04_expert_groups_exist_without_tensor_parallelism_and_no_collective_vanishes() {
    let layer = "moe\t-1\t10\tALLTOALL_EP\t4096\t10\tALLTOALL_EP\t4096\t10\tALLREDUCE_DP_EP\t8192\t100\n";
    let text = format!(
        "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 1 ep: 8 pp: 1 all_gpus: 16 checkpoints: 0\n4\n{}",
        layer.repeat(4)
    );
    let (graph, summary) = import_text(&text, &Options::default()).unwrap();
    assert_eq!((summary.world_size, summary.degrees), (16, (1, 8, 16)));
    assert_eq!((summary.collectives, summary.collectives_alone), (12, 0));
    let groups: Vec<Vec<u32>> =
        (0..graph.num_comms() as u32).map(|comm| graph.comm_members(CommId(comm)).to_vec()).collect();
    assert!(groups.contains(&(0..8).collect()) && groups.contains(&(8..16).collect()));
    assert!((0..8).all(|k| groups.contains(&vec![k, k + 8])));
    assert_eq!(graph.rank_slots(Rank(5)).len(), 3);
    // With one expert group per rank, the calls are counted as alone.
    let alone = import_text(&text.replace("ep: 8", "ep: 1"), &Options::default()).unwrap().1;
    assert_eq!((alone.collectives, alone.collectives_alone), (12, 8));
}

#[test]
fn weights_are_reduced_beside_the_computing_and_waited_for_at_the_end() {
    let text = |kind: &str| {
        let layer = format!("layer\t-1\t1000000\tNONE\t0\t1000000\tNONE\t0\t1000000\t{kind}\t536870912\t100\n");
        format!("HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 1\n2\n{}", layer.repeat(2))
    };
    let without = time(import_text(&text("NONE"), &of(16)).unwrap().0);
    let with = time(import_text(&text("ALLREDUCE"), &of(16)).unwrap().0);
    assert_eq!(without, 6_000_000);
    // One reduction is hidden behind 2 ms of the other layer, and the rest is not.
    assert!(with > without + 1_000_000, "{with}");
    let twice = Options { iterations: 2, ..of(16) };
    assert_eq!(time(import_text(&text("NONE"), &twice).unwrap().0), 12_000_000);
}

#[test]
fn what_is_no_workload_is_an_error_that_names_the_line() {
    let error = |text: &str, options: &Options| import_text(text, options).unwrap_err();
    assert!(error("", &of(8)).contains("it is empty"));
    assert!(error("MICRO\nmany\n", &of(8)).contains("line 2"));
    assert!(error("MICRO\n1\nx -1 1\n", &of(8)).contains("line 3: a layer has 12 fields"));
    assert!(error("MICRO\n2\nx -1 1 NONE 0 1 NONE 0 1 ALLREDUCE 8 1\n", &of(8)).contains("2 layers are announced, 1"));
    assert!(error("MICRO\n1\nx -1 1 NONE 0 1 NONE 0 1 GOSSIP 8 1\n", &of(8)).contains("GOSSIP"));
    assert!(error("MICRO\n1\nx -1 99999999999999999 NONE 0 1 NONE 0 1 ALLREDUCE 8 1\n", &of(8)).contains("too long"));
    let whole = "MICRO\n1\nx -1 1 NONE 0 1 NONE 0 1 ALLREDUCE 8 1\n";
    assert!(error(whole, &Options::default()).contains("--world-size"));
    let tensor = whole.replace("MICRO", "HYBRID model_parallel_NPU_group: 3");
    assert!(error(&tensor, &of(8)).contains("do not divide"));
    assert!(error("comm_type,comm_group\n", &of(8)).contains("has no calls"));
}

#[test]
fn lists_of_aicb_s_own_calls_are_read() {
    let read = |name: &str, options: &Options| {
        Some(import(&shared(&format!("traces/aicb/{name}"))?, options).map_err(|error| error.to_string()))
    };
    let name = "workload__physical__model_workload__L7B-M1-C04_Llama7B_megatron_tp2_pp1_mbs1.csv";
    let Some(found) = read(name, &Options::default()) else { return };
    let (_, summary) = found.unwrap();
    // 160 lines; two of columns and ranks, the ends of iterations, and the calls.
    assert_eq!((summary.world_size, summary.degrees), (128, (2, 1, 64)));
    assert_eq!(summary.collectives_alone, 0);
    assert!(summary.collectives > 100 && summary.layers > summary.collectives);
    let zero = "workload__physical__model_workload__L13B-D1-C04_Llama13B_zero3_mbs1.csv";
    let (_, summary) = read(zero, &Options::default()).unwrap().unwrap();
    assert_eq!((summary.world_size, summary.degrees), (128, (1, 1, 128)));
    let moe = "visualize__inputs__A100_example.csv";
    let error = read(moe, &Options::default()).unwrap().unwrap_err();
    assert!(error.contains("--expert-parallel"), "{error}");
    let options = Options { expert_parallel: Some(4), ..Options::default() };
    let (_, summary) = read(moe, &options).unwrap().unwrap();
    assert_eq!((summary.world_size, summary.degrees), (8, (2, 4, 4)));
}

#[test]
fn a_list_of_calls_takes_what_its_calls_take() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calls.csv");
    let header = "[rank0 ~ rank7]\ncomm_type,comm_group,comm_group_size,msg_size,stage,dst,src,additional,_elapsed_time,algbw,busbw,count\n";
    let calls = "CommType.broadcast,CommGroup.dp_group,8,4096,init.model,None,0,,None,None,None,1\n\
        CommType.epoch_end,None,None,0,,None,None,,None,None,None,1\n\
        CommType.computation,None,None,0,forward,None,None,,1.5,None,None,1\n\
        CommType.all_gather,CommGroup.dp_group,8,8388608,backward,None,None,,9.0,None,None,1\n\
        CommType.epoch_end,None,None,0,,None,None,,None,None,None,1\n";
    std::fs::write(&path, format!("{header}{calls}")).unwrap();
    let (graph, _) = import(&path, &Options::default()).unwrap();
    let profile = Profile::from_toml(&graph.meta()["profile"]).unwrap();
    let times = replay(&Arc::new(graph), &ReplayOptions::new(profile)).unwrap().iteration_time_ns;
    assert_eq!(times.len(), 1, "what comes before training is no iteration");
    // 1 MiB of each of 8 ranks takes some 30 us on NVLink, not the 9 ms that were measured elsewhere.
    assert!((1_510_000..1_600_000).contains(&times[0]), "{times:?}");
    for (line, wanted) in [
        ("CommType.isend,CommGroup.pp_group,2,10,forward,1,None,,None,None,None,1", "line 3: isend is not supported"),
        ("CommType.all_reduce,CommGroup.dp_group,x,10,forward,None,None,,None,None,None,1", "line 3: a group of x"),
        ("CommType.all_reduce,CommGroup.dp_group,8,-1,forward,None,None,,None,None,None,1", "no number of bytes"),
        ("CommType.computation,None,None,0,forward,None,None,,None,None,None,1", "without a time"),
        ("CommType.all_reduce,CommGroup.dp_group,4,10,forward,None,None,,None,None,None,1", "with pipeline stages"),
        ("CommType.all_reduce", "no value for stage"),
    ] {
        std::fs::write(&path, format!("{header}{line}\n")).unwrap();
        let error = import(&path, &Options::default()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}
