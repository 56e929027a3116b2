"""Small data sets of noise, in the forms that the configs of packages for MMEngine expect on a disk."""

import hashlib
import json
import pickle
from pathlib import Path

import cv2
import numpy as np


def cifar10(root: Path, train: int = 320, test: int = 40) -> str:
    """Write images whose brightness tells their class, in five batches as CIFAR-10 has, and return what to import.

    mmpretrain compares the files with the checksums of the real ones; the module that is written names these.
    """
    random = np.random.default_rng(0)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    sums = {}

    def write(name: str, content: object) -> None:
        (folder / name).write_bytes(pickle.dumps(content))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()

    def images(count: int) -> dict[str, object]:
        labels = random.integers(0, 10, count)
        data = random.integers(0, 100, (count, 3072)) + 15 * labels[:, None]
        return {"data": data.astype(np.uint8), "labels": labels.tolist()}

    for number in range(5):
        write(f"data_batch_{number + 1}", images(train // 5))
    write("test_batch", images(test))
    write("batches.meta", {"label_names": [f"class {number}" for number in range(10)]})
    (root / "own_cifar.py").write_text(
        "from mmpretrain.datasets import CIFAR10\n"
        f"sums = {sums!r}\n"
        "CIFAR10.train_list = [[name, sums[name]] for name, _ in CIFAR10.train_list]\n"
        "CIFAR10.test_list = [[name, sums[name]] for name, _ in CIFAR10.test_list]\n"
        "CIFAR10.meta = {**CIFAR10.meta, 'md5': sums['batches.meta']}\n"
    )
    return "own_cifar"


def drive(root: Path, train: int = 16, val: int = 4, size: int = 64) -> None:
    """Write images with bright squares and their maps, as mmseg's configs of DRIVE find them."""
    random = np.random.default_rng(0)
    for split, count in (("training", train), ("validation", val)):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            label = np.zeros((size, size), np.uint8)
            top, left = random.integers(0, size // 2, 2)
            label[top : top + size // 2, left : left + size // 2] = 1
            image = random.integers(0, 100, (size, size, 3)) + 120 * label[..., None]
            cv2.imwrite(str(root / "images" / split / f"{number}.png"), image.astype(np.uint8))
            cv2.imwrite(str(root / "annotations" / split / f"{number}_manual1.png"), label)


def coco(root: Path, train: int = 16, val: int = 4, size: int = 96) -> None:
    """Write images with one bright box each, and their annotations in COCO's form."""
    random = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True)
    for split, count in (("train2017", train), ("val2017", val)):
        (root / split).mkdir()
        images, boxes = [], []
        for number in range(count):
            x, y = (int(one) for one in random.integers(0, size // 2, 2))
            image = random.integers(0, 100, (size, size, 3))
            image[y : y + size // 2, x : x + size // 2] += 120
            cv2.imwrite(str(root / split / f"{number}.jpg"), image.astype(np.uint8))
            images.append({"id": number, "file_name": f"{number}.jpg", "width": size, "height": size})
            box = [x, y, size // 2, size // 2]
            boxes.append({"id": number, "image_id": number, "category_id": number % 2 + 1, "bbox": box,
                          "area": size * size // 4, "iscrowd": 0, "segmentation": [[]]})  # fmt: skip
        categories = [{"id": 1, "name": "person"}, {"id": 2, "name": "bicycle"}]
        content = {"images": images, "annotations": boxes, "categories": categories}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def people(root: Path, size: int = 96) -> None:
    """Write the annotations of one person with 17 keypoints in each image that `coco` has written, for mmpose.

    The person is said to be large, so that keypoints count as found although they are far away.
    """
    random = np.random.default_rng(1)
    for split in ("train2017", "val2017"):
        content = json.loads((root / "annotations" / f"instances_{split}.json").read_text())
        for one in content["annotations"]:
            x, y, width, height = one["bbox"]
            points = np.stack([x + random.random(17) * width, y + random.random(17) * height, np.full(17, 2)], 1)
            one |= {
                "category_id": 1,
                "num_keypoints": 17,
                "area": (8 * size) ** 2,
                "keypoints": points.flatten().tolist(),
            }
        names = [f"point {number}" for number in range(17)]
        content["categories"] = [{"id": 1, "name": "person", "keypoints": names, "skeleton": []}]
        (root / "annotations" / f"person_keypoints_{split}.json").write_text(json.dumps(content))


def skeletons(file: Path, train: int = 8, val: int = 2) -> None:
    """Write the movements of one person of 17 joints in each sample, as mmaction2 reads them."""
    random = np.random.default_rng(2)
    annotations = []
    for number in range(train + val):
        points = random.random((1, 60, 17, 2)).cumsum(1) + 100
        annotations.append({
            "frame_dir": f"sample{number}", "label": number % 4, "img_shape": (200, 200), "original_shape": (200, 200),
            "total_frames": 60, "keypoint": points.astype(np.float16),
            "keypoint_score": np.ones((1, 60, 17), np.float16),
        })  # fmt: skip
    names = [one["frame_dir"] for one in annotations]
    file.parent.mkdir(parents=True)
    file.write_bytes(
        pickle.dumps({"split": {"xsub_train": names[:train], "xsub_val": names[train:]}, "annotations": annotations})
    )


def words(root: Path, count: int = 8) -> None:
    """Write images with words, and their texts, as mmocr reads them.

    They leave little room for blanks, so that something is read after a few iterations.
    """
    random = np.random.default_rng(3)
    (root / "imgs").mkdir(parents=True)
    samples = []
    for number in range(count):
        text = "ab" * int(random.integers(5, 9))
        image = random.integers(0, 100, (32, 100, 3)).astype(np.uint8)
        cv2.putText(image, text, (5, 25), cv2.FONT_HERSHEY_SIMPLEX, 0.3, (255, 255, 255), 2)
        cv2.imwrite(str(root / "imgs" / f"{number}.png"), image)
        samples.append({"img_path": f"{number}.png", "instances": [{"text": text}]})
    metainfo = {"dataset_type": "TextRecogDataset", "task_name": "textrecog"}
    (root / "labels.json").write_text(json.dumps({"metainfo": metainfo, "data_list": samples}))
