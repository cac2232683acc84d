//! What machines of several sizes have room for.

use shoal_scheduler::sim::Scenario;

use super::*;

fn manifest() -> Manifest {
    Scenario::small_manifest(3, 8, 1)
}

#[test]
fn the_least_memory_of_a_machine_that_swaps_is_enough_and_less_is_not() {
    let mut manifest = Scenario::small_manifest(8, 8, 1);
    manifest.model.slices = 2;
    let all = StageSpan::all(8);
    for (log_memory, devices) in [(0, 1), (1 << 10, 1), (1 << 30, 1), (0, 2), (1 << 30, 2)] {
        let log_memory = Bytes(log_memory);
        let of = |memory| {
            let budget = budget(memory, 1 << 40);
            ResourceBudget { devices, on_gpus: false, together: devices, log_memory, ..budget }
        };
        let Err(InsufficientResources::Memory { needs, .. }) = of(1).check(&manifest, all) else {
            panic!("a byte is too little");
        };
        assert!(of(needs.0).swaps(&manifest, all), "less than all of it");
        assert_eq!(of(needs.0).check(&manifest, all), Ok(()));
        let less = of(needs.0 - 1).check(&manifest, all);
        assert!(matches!(less, Err(InsufficientResources::Memory { .. })), "{less:?}");
    }
}

fn budget(memory: u64, disk: u64) -> ResourceBudget {
    let (memory, disk) = (Bytes(memory), Bytes(disk));
    let folder = PathBuf::from("/data");
    let (device, log_memory) = (None, Bytes(0));
    ResourceBudget {
        memory,
        devices: 1,
        on_gpus: true,
        has_kernels: false,
        copies: 1,
        device,
        together: 1,
        dividing: None,
        log_memory,
        disk,
        folder,
    }
}

/// Devices that have the passes of all stages.
fn plain(devices: &[DeviceChoice]) -> PeerDevices {
    PeerDevices { each: devices.to_vec(), threads: 1, divide_stages: false }
}

#[test]
fn a_measured_machine_has_memory_and_disk() {
    let folder = std::env::temp_dir();
    let limits = ResourceLimits { log_memory: Bytes(0), ..ResourceLimits::default() };
    let run = (&manifest(), StageChoice::All);
    let devices = plain(&[DeviceChoice::Cpu]);
    let budget = ResourceBudget::measure(limits, &devices, &folder, run);
    let budget = budget.expect("measured");
    assert!(budget.memory > Bytes::mebi(1) && budget.disk > Bytes::mebi(1), "{budget:?}");
}

#[test]
fn an_error_names_the_room_needed_and_the_room_there_is() {
    let manifest = manifest();
    let one = |stage| StageChoice::Span(StageSpan::one(Stage(stage)));
    let enough = budget(1 << 30, 1 << 30);
    let all: BTreeSet<Stage> = manifest.stages().collect();
    for choice in [StageChoice::Auto, StageChoice::All, StageChoice::None, one(1), one(9)] {
        assert_eq!(enough.fits(&manifest, choice), Ok(all.clone()), "{choice:?}");
    }
    let small = budget(1, 1 << 30);
    let none = Ok(BTreeSet::new());
    assert_eq!(small.fits(&manifest, StageChoice::None), none);
    let error = small.fits(&manifest, StageChoice::Auto).expect_err("no memory");
    assert!(matches!(error, InsufficientResources::Memory { has: Bytes(1), .. }), "{error}");
    let error = budget(1 << 30, 1).fits(&manifest, one(1)).expect_err("no disk");
    assert!(matches!(error, InsufficientResources::Disk { has: Bytes(1), .. }), "{error}");
    assert!(error.to_string().contains("/data"), "{error}");
}

#[test]
fn the_disk_has_a_place_for_each_tensor_that_does_not_fit_into_memory() {
    let manifest = manifest();
    let span = StageSpan::one(Stage(1));
    let one = manifest.largest_logged();
    let spilled = |log_memory| LogSize::of(&manifest, span).spilled(&manifest, log_memory);
    // Eight activations and eight gradients, which are a little smaller.
    assert_eq!(spilled(Bytes(0)), 16);
    assert_eq!(spilled(Bytes(3 * one.0)), 13);
    assert_eq!(spilled(manifest.output_log_bytes(Stage(1))), 0);
}

#[test]
fn a_peer_with_room_for_one_stage_and_not_for_two_keeps_its_first() {
    let manifest = manifest();
    let all: BTreeSet<Stage> = manifest.stages().collect();
    let alone = |stage: &Stage| budget(0, 0).disk_for(&manifest, StageSpan::one(*stage), false);
    let largest = all.iter().map(alone).max().expect("there are stages").0;
    let auto = |disk| budget(1 << 40, disk).room(&manifest, StageChoice::Auto, &all).in_memory;
    let one = budget(1 << 40, largest);
    assert_eq!(one.fits(&manifest, StageChoice::Auto), Ok(all.clone()));
    assert_eq!([largest, 2 * largest - 1, 2 * largest].map(auto), [1, 1, 2]);
    assert_eq!(auto(1 << 40), 3, "all of them");
    let folder = tempfile::tempdir().expect("a folder");
    let one = ResourceBudget { folder: folder.path().to_owned(), ..one };
    let places = |room| {
        let file = one.spill_file(&manifest, StageSpan::one(Stage(1)), room);
        file.expect("room").expect("something is spilled").places()
    };
    assert_eq!([0, 1, 2].map(places), [16, 16, 32]);
}

#[test]
fn the_windows_follow_from_the_free_memory() {
    let manifest = manifest();
    let stages = BTreeSet::from([Stage(0), Stage(1)]);
    let windows = |memory, resident| budget(memory, 0).windows(&manifest, &stages, (resident, 64));
    let of_gpu = |stage, in_flight| {
        let span = StageSpan::one(Stage(stage));
        memory_floor(&manifest, span, in_flight) + gpu_overhead(&manifest, span, in_flight, false)
    };
    let floors = [0, 1].map(|stage| [0, 4].map(|in_flight| of_gpu(stage, in_flight).0));
    let larger = |at: usize| floors[0][at].max(floors[1][at]);
    let largest = floors.iter().map(|floor| floor[1] - floor[0]).max().expect("two stages");
    let four = larger(0) + largest;
    assert_eq!(windows(four, 1), [4, 64], "swapped ones keep no graphs");
    assert_eq!(windows(four - 1, 1), [3, 64]);
    let both = floors[0][1] + floors[1][1];
    assert_eq!(windows(both, 2)[1..], [4, 64], "of both stages");
    assert_eq!(windows(1 << 40, u16::MAX), [64; 3]);
    assert_eq!(windows(0, 1), [1, 64]);
    assert_eq!(windows(0, 0), [64]);
}

#[test]
fn a_device_that_does_not_hold_the_stages_has_their_weights_while_passes_read_them() {
    let manifest = Scenario::small_manifest(8, 8, 1);
    let (one, all) = (StageSpan::one(Stage(0)), StageSpan::all(8));
    let folder = tempfile::tempdir().expect("a folder");
    let measure = |device_memory, choice| {
        let limits = ResourceLimits { device_memory, ..ResourceLimits::default() };
        let devices = plain(&[DeviceChoice::Cpu]);
        ResourceBudget::measure(limits, &devices, folder.path(), (&manifest, choice))
    };
    let through = |memory, choice| measure(Some(memory), choice).expect("measured").device;
    let (small, large) = (memory_floor(&manifest, one, 1), memory_floor(&manifest, all, 1));
    assert_eq!(through(large, StageChoice::All), None, "it holds all");
    assert_eq!(through(large - Bytes(1), StageChoice::All), Some(large - Bytes(1)));
    assert_eq!(through(small, StageChoice::Span(one)), None);
    assert_eq!(measure(None, StageChoice::All).expect("measured").device, None);

    let floor = device_floor(&manifest, 1);
    let two = Bytes(floor.passes.0 + 2 * floor.weights.0);
    let budget = measure(Some(two), StageChoice::All).expect("measured");
    assert_eq!(budget.resident(&manifest, StageChoice::All), 2, "two on the device");
    let stages: BTreeSet<Stage> = manifest.stages().collect();
    assert_eq!(budget.fits(&manifest, StageChoice::All), Ok(stages.clone()));
    let tiers = budget.tiers(&manifest, StageChoice::All, StageRoom::NONE);
    assert!(tiers.device == Some(two) && tiers.lower.is_none(), "memory holds all: {tiers:?}");
    let budget = measure(Some(floor.passes), StageChoice::Auto).expect("measured");
    let error = budget.fits(&manifest, StageChoice::Auto).expect_err("room for no weights");
    assert!(error.to_string().contains("--device-memory"), "{error}");
    // Replicas have all weights all the time.
    let replicas = |memory, choice| {
        let limits = ResourceLimits { device_memory: Some(memory), ..ResourceLimits::default() };
        let devices = plain(&[DeviceChoice::Cpu; 2]);
        ResourceBudget::measure(limits, &devices, folder.path(), (&manifest, choice))
            .expect("measured")
    };
    let error = replicas(two, StageChoice::All).fits(&manifest, StageChoice::All);
    let error = error.expect_err("room for two of eight").to_string();
    assert!(error.contains("the weights of 8 stages and a pass take"), "{error}");
    let span = StageChoice::Span(StageSpan { first: Stage(0), last: Stage(1) });
    let budget = replicas(two, span);
    assert!(budget.fits(&manifest, span).is_ok());
    let room = budget.room(&manifest, StageChoice::Auto, &stages);
    assert_eq!((room.in_memory, room.most), (2, 2));
}

#[test]
fn devices_that_share_slices_divide_what_passes_read() {
    let mut manifest = Scenario::small_manifest(8, 8, 1);
    manifest.model.slices = 2;
    let folder = tempfile::tempdir().expect("a folder");
    let [one, two] = [1, 2].map(|devices| device_floor(&manifest, devices));
    assert!(two.weights < one.weights && two.passes < one.passes);
    let measure = |devices: usize| {
        let memory = two.passes + two.weights;
        let limits = ResourceLimits { device_memory: Some(memory), ..ResourceLimits::default() };
        let run = (&manifest, StageChoice::All);
        ResourceBudget::measure(
            limits,
            &plain(&vec![DeviceChoice::Cpu; devices]),
            folder.path(),
            run,
        )
        .expect("measured")
    };
    assert_eq!(measure(2).resident(&manifest, StageChoice::All), 1);
    let error = measure(1).fits(&manifest, StageChoice::All).expect_err("room for no weights");
    assert!(error.to_string().contains("--device-memory"), "{error}");
    // Their state is in the machine's memory, beside what each has of the weights.
    let memory = |devices| measure(devices).memory_for(&manifest, StageSpan::all(8), 1);
    let further = island_overhead(&manifest, StageSpan::all(8), 2);
    assert_eq!(memory(2), memory(1) + further);
}

#[test]
fn gpus_without_slices_each_have_all_of_the_state() {
    let manifest = Scenario::small_manifest(8, 8, 1);
    let (stages, folder) = (manifest.stages().collect(), tempfile::tempdir().expect("a folder"));
    let measure_divided = |count: usize, memory, divide_stages| {
        let (device_memory, log_memory) = (Some(memory), Bytes(0));
        let limits = ResourceLimits { device_memory, log_memory, ..ResourceLimits::default() };
        let devices: Vec<_> = (0..count).map(DeviceChoice::Cuda).collect();
        let devices = PeerDevices { divide_stages, ..plain(&devices) };
        let run = (&manifest, StageChoice::Auto);
        ResourceBudget::measure(limits, &devices, folder.path(), run).expect("measured")
    };
    let measure = |count, memory| measure_divided(count, memory, false);
    let all = StageSpan::all(8);
    let floor = memory_floor(&manifest, all, 1) + gpu_overhead(&manifest, all, 1, false);
    let room = |count, memory| {
        let budget = measure(count, memory);
        (budget.device, budget.room(&manifest, StageChoice::Auto, &stages).in_memory)
    };
    assert_eq!([1, 2].map(|count| room(count, floor)), [(None, 8); 2]);
    assert!(room(2, floor - Bytes(1)).1 < 8, "two GPUs do not divide it");
    let window = |count| measure(count, floor).windows(&manifest, &stages, (8, 64))[7];
    assert_eq!([1, 2].map(window), [1, 2], "microbatches are divided");
    // Those that divide the stages have half of it each.
    let half = Bytes(floor.0 * 2 / 3);
    assert!(measure_divided(2, half, true).fits(&manifest, StageChoice::All).is_ok());
    assert!(measure_divided(2, half, false).fits(&manifest, StageChoice::All).is_err());
    let error = measure_divided(2, Bytes(floor.0 / 4), true).fits(&manifest, StageChoice::All);
    assert!(matches!(error, Err(InsufficientResources::Memory { .. })), "{error:?}");
}

#[test]
fn gpus_with_slices_divide_the_state() {
    let mut manifest = Scenario::small_manifest(8, 8, 1);
    manifest.model.slices = 2;
    let folder = tempfile::tempdir().expect("a folder");
    let all = StageSpan::all(8);
    let of_pass = manifest
        .stages()
        .map(|stage| gpu_overhead(&manifest, StageSpan::one(stage), 1, false))
        .max()
        .expect("there are stages");
    let of_state = memory_floor(&manifest, all, 1) + gpu_overhead(&manifest, all, 1, false);
    let of_all = |devices| of_state + island_overhead(&manifest, all, devices);
    for devices in [2, 4] {
        let measure = |memory| {
            let limits =
                ResourceLimits { device_memory: Some(Bytes(memory)), ..ResourceLimits::default() };
            let gpus: Vec<_> = (0..devices).map(DeviceChoice::Cuda).collect();
            let run = (&manifest, StageChoice::All);
            ResourceBudget::measure(limits, &plain(&gpus), folder.path(), run).expect("measured")
        };
        let each = of_all(devices).0.div_ceil(devices as u64);
        let budget = measure(each);
        assert_eq!((budget.device, budget.memory), (None, Bytes(devices as u64 * each)));
        assert_eq!(
            measure(each - 1).device,
            Some(Bytes(each - 1) - of_pass),
            "state in the machine's memory"
        );
    }
}

#[test]
fn stages_that_memory_does_not_hold_have_room_on_the_disk() {
    let manifest = Scenario::small_manifest(8, 8, 1);
    let all: BTreeSet<Stage> = manifest.stages().collect();
    let of = |memory, disk| ResourceBudget { on_gpus: false, ..budget(memory, disk) };
    let room = |budget: &ResourceBudget| {
        let room = budget.room(&manifest, StageChoice::Auto, &all);
        (room.in_memory, room.most)
    };
    let alone = |stage| of(0, 0).memory_for(&manifest, StageSpan::one(stage), 1);
    let largest = manifest.stages().map(alone).max().expect("there are stages").0;
    let two = of(2 * largest, 1 << 40);
    assert_eq!(room(&two), (2, 8));
    let (in_memory, most) = room(&ResourceBudget { devices: 2, ..two.clone() });
    assert_eq!(in_memory, most, "replicas do not swap");
    let disk = two.disk_of(&manifest, Stage(0), true).max(two.disk_of(&manifest, Stage(7), true));
    assert_eq!(room(&of(2 * largest, 2 * disk.0)), (2, 2), "a small disk");
    assert_eq!(room(&of(1 << 40, 1 << 40)), (8, 8));
    let tier = |budget: &ResourceBudget| {
        let room = budget.room(&manifest, StageChoice::Auto, &all);
        let tiers = budget.tiers(&manifest, StageChoice::Auto, room);
        tiers.lower.map(|tier| tier.resident)
    };
    assert_eq!([tier(&two), tier(&of(1 << 40, 1 << 40))], [Some(2), None]);
}
