//! Perturbations that are wrong say where and why.

use super::profile;
use prism_engine::perturb::{Perturbations, World};

fn error(text: &str) -> String {
    let world = World::new(16, &profile());
    Perturbations::from_toml(text, world).expect_err(text).to_string()
}

fn entry_error(text: &str) -> String {
    error(&format!("[[perturb]]\n{text}"))
}

#[test]
fn nothing_is_fine() {
    let world = World::new(16, &profile());
    assert!(Perturbations::from_toml("", world).expect("valid").is_empty());
}

#[test]
fn what_is_unknown_is_named() {
    let cases = [
        ("kind = \"strangler\"", "perturb[0] (strangler): unknown kind; there are straggler, "),
        ("ranks = [0]", "`kind` is missing"),
        ("kind = 5", "`kind` is 5"),
        ("kind = \"straggler\"\nranks = [0]", "`factor` is missing"),
        (
            "kind = \"straggler\"\nranks = [0]\nfactor = 2\nfacto = 1",
            "unknown key `facto`; there are classes, factor, ",
        ),
        ("kind = \"straggler\"\nranks = [0, 16]\nfactor = 2", "rank 16 does not exist: the world has 16 ranks"),
        ("kind = \"straggler\"\nranks = [-1]\nfactor = 2", "`ranks` must be a whole number from 0, not -1"),
        ("kind = \"straggler\"\nranks = \"3-x\"\nfactor = 2", "\"x\" is not a rank"),
        ("kind = \"straggler\"\nranks = \"3-1\"\nfactor = 2", "ends before it begins"),
        ("kind = \"straggler\"\nranks = []\nfactor = 2", "it names no rank"),
        ("kind = \"straggler\"\nfactor = 2", "it names no rank"),
        ("kind = \"straggler\"\nnodes = [2]\nfactor = 2", "the world has 2 nodes, 0 to 1"),
        ("kind = \"straggler\"\nstride = { first = 0, step = 0 }\nfactor = 2", "`stride.step` must be at least 1"),
        ("kind = \"straggler\"\nstride = { first = 99, step = 1 }\nfactor = 2", "rank 99 does not exist"),
        ("kind = \"straggler\"\nstride = { first = 0, step = 1, x = 1 }\nfactor = 2", "unknown key `stride.x`"),
        ("kind = \"straggler\"\nranks = [0]\nfactor = 0", "`factor` must be above 0 and at most 1e6, not 0"),
        ("kind = \"straggler\"\nranks = [0]\nfactor = nan", "`factor` must be a number, not NaN"),
        ("kind = \"straggler\"\nranks = [0]\nfactor = \"2\"", "`factor` must be a number, not \"2\""),
        (
            "kind = \"straggler\"\nranks = [0]\nfactor = 2\nclasses = [\"gem\"]",
            "`classes` has \"gem\"; there are kernel, gemm",
        ),
        ("kind = \"straggler\"\nranks = [0]\nfactor = 2\nnames = \"x\"", "`names` must be a list of names"),
        ("kind = \"straggler\"\nranks = [0]\nfactor = 2\niterations = [3, 3]", "`iterations` must be [from, to]"),
        ("kind = \"straggler\"\nranks = [0]\nfactor = 2\niterations = [3]", "`iterations` must be [from, to]"),
        ("kind = \"straggler\"\nranks = [0]\nfactor = 2\niterations = [0, 9999999999]", "at most 4294967295"),
        (
            "kind = \"straggler\"\nranks = [0]\nfactor = 2\ntime_ns = [0, 9223372036854775807]",
            "`time_ns` must be at most",
        ),
        ("kind = \"jitter\"\nranks = [0]\ndistribution = \"cauchy\"", "`distribution` is \"cauchy\"; there are normal"),
        (
            "kind = \"jitter\"\nranks = [0]\ndistribution = \"normal\"\nmean = 1\nstd = 1\nlow = 2\nmode = \"add\"\nseed = 1",
            "unknown key `low`",
        ),
        (
            "kind = \"jitter\"\nranks = [0]\ndistribution = \"uniform\"\nlow = 3\nhigh = 2\nmode = \"add\"\nseed = 1",
            "`low` is above `high`",
        ),
        (
            "kind = \"jitter\"\nranks = [0]\ndistribution = \"uniform\"\nlow = 1\nhigh = 2\nmode = \"div\"\nseed = 1",
            "`mode` is \"div\"",
        ),
        ("kind = \"rank-death\"\nrank = 99\niteration = 1", "rank 99 does not exist"),
        ("kind = \"rank-death\"\nrank = 1", "either `time_ns` or `iteration`"),
        ("kind = \"rank-death\"\nrank = 1\ntime_ns = 1\niteration = 1", "either `time_ns` or `iteration`"),
        ("kind = \"slow-link\"\nranks = [0]", "`bandwidth_factor` or `added_latency_ns` must be given"),
        ("kind = \"slow-link\"\nranks = [0]\nbandwidth_factor = 0", "`bandwidth_factor` must be 1e-6 to 1000"),
        ("kind = \"slow-link\"\nnodes = [0]\nnics = [8]\nbandwidth_factor = 0.5", "`nics` has 8: a node has 8 cards"),
        ("kind = \"slow-link\"\nnodes = [0]\nnics = [1]\nscope = \"intra\"\nbandwidth_factor = 0.5", "must be inter"),
        ("kind = \"slow-link\"\nranks = [0]\nscope = \"outer\"\nbandwidth_factor = 0.5", "`scope` is \"outer\""),
        ("kind = \"imbalance\"\nranks = [0]", "one of `factor`, `factors` and `zipf` must be given"),
        (
            "kind = \"imbalance\"\nranks = [0]\nfactor = 1\nzipf = 1",
            "one of `factor`, `factors` and `zipf` must be given",
        ),
        ("kind = \"imbalance\"\nranks = [0, 1]\nfactors = [1]", "`factors` has 1 entries for 2 ranks"),
        ("kind = \"imbalance\"\nranks = [0, 0]\nfactors = [1, 2]", "`ranks` names a rank twice"),
        ("kind = \"imbalance\"\nranks = [0, 1]\nfactors = [1, -1]", "`factors` has -1"),
        ("kind = \"imbalance\"\nranks = [0, 1]\nfactor = 2\nseed = 1", "`seed` goes with `zipf`"),
    ];
    for (text, expected) in cases {
        let found = entry_error(text);
        assert!(found.contains(expected), "{text}\n  says  {found}\n  not   {expected}");
        assert!(found.starts_with("perturb[0] ("), "{found}");
    }
}

#[test]
fn thermal_numbers_must_make_sense() {
    let base = "kind = \"thermal-throttle\"\nranks = [0]\nambient_c = 30\nthrottle_c = 70\nhysteresis_c = 5\n\
                resistance_c_per_w = 0.1\ncapacitance_j_per_c = 10\nidle_w = 0\npower_w = 500\n\
                clocks = [1.0, 0.5]\nperiod_ns = 100000";
    let with = |from: &str, to: &str| entry_error(&base.replace(from, to));
    assert!(with("idle_w = 0", "idle_w = 400").contains("an idle GPU would stay throttled"));
    assert!(with("[1.0, 0.5]", "[0.9, 0.5]").contains("`clocks` must fall from 1.0"));
    assert!(with("[1.0, 0.5]", "[1.0, 1.0]").contains("`clocks` must fall from 1.0"));
    assert!(with("[1.0, 0.5]", "[1.0, 0.0]").contains("`clocks` must fall from 1.0"));
    assert!(with("= 100000", "= 99").contains("`period_ns` must be 100000"));
    assert!(
        with("power_w = 500", "power_w = 500\nclass_power_w = { gem = 1 }").contains("unknown key `class_power_w.gem`")
    );
    assert!(with("resistance_c_per_w = 0.1\n", "").contains("`resistance_c_per_w` is missing"));
}

#[test]
fn the_document_itself() {
    assert!(error("[[perturb]\n").contains("perturbations: "));
    assert!(error("[perturb]\nkind = \"straggler\"").contains("write [[perturb]]"));
    assert!(error("perturb = [1]").contains("perturb[0] must be a table"));
    assert!(error("[[pertub]]").contains("unknown key `pertub`"));
    assert!(error("[slow]\nx = 2.0").contains("\"x\" is not a rank"));
    assert!(error("[slow]\n99 = 2.0").contains("rank 99 does not exist"));
    let second = error("[[perturb]]\nkind = \"straggler\"\nranks = [0]\nfactor = 2\n[[perturb]]\nkind = \"jitter\"");
    assert!(second.starts_with("perturb[1] (jitter): `distribution` is missing"), "{second}");
}

#[test]
fn there_is_room_for_so_many() {
    let link = "[[perturb]]\nkind = \"slow-link\"\nranks = [0]\nbandwidth_factor = 0.5\n";
    assert_eq!(error(&link.repeat(65)), "perturbations: at most 64 rules about communication");
    let named = |n: u32| format!("[[perturb]]\nkind = \"straggler\"\nranks = [0]\nfactor = 2\nnames = [\"n{n}\"]\n");
    let text: String = (0..9).map(named).collect();
    assert_eq!(error(&text), "perturbations: at most 8 different lists of names");
    assert!(Perturbations::from_toml(&named(1).repeat(9), World::new(16, &profile())).is_ok(), "equal lists are one");
}
