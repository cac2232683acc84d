use super::*;

#[test]
fn first_seeds() {
    let from = std::env::var("SHOAL_SIM_SEED").ok().and_then(|s| s.parse().ok());
    let seeds: Vec<u64> = from.map_or((0..200).collect(), |s| vec![s]);
    let mut bad = 0;
    for seed in seeds {
        let scenario = Scenario::from_seed(seed);
        match run(&scenario) {
            Ok(report) => println!(
                "{seed}: peers {} stages {} M {} steps {} events {} end {:?} busy {} redirect {}",
                scenario.peers.len(),
                scenario.manifest.training.stages,
                scenario.manifest.training.microbatches,
                scenario.manifest.training.steps,
                report.events,
                report.end,
                report.turned_away,
                report.redirected
            ),
            Err(v) => {
                bad += 1;
                println!(
                    "{seed}: {v} peers {} stages {}",
                    scenario.peers.len(),
                    scenario.manifest.training.stages
                )
            }
        }
    }
    assert_eq!(bad, 0);
}
