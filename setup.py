"""Packaging of mala_mm. The reasons for the version bounds stand in the README, "Versions"."""

from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
version = {}
exec((root / 'mala_mm' / 'version.py').read_text(), version)

setup(
    name='mala_mm',
    version=version['__version__'],
    description='MAViT backbones with Magnitude-Aware Linear Attention for mmdet and mmseg',
    long_description=(root / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=find_packages(include=['mala_mm', 'mala_mm.*']),
    # configs/ and tools/ travel inside the package, where mmengine's tools look for them
    package_data={'mala_mm': ['.mim/**/*.py', '.mim/**/*.sh']},
    python_requires='>=3.10,<3.14',
    install_requires=[
        'torch>=2.6',
        'torchvision>=0.21',
        'safetensors',
        'mmengine==0.10.7',
        'mmcv-lite>=2.0.1,<2.2',
        'mmdet==3.3.0',
        'mmsegmentation==1.2.2',
        'setuptools<81',
        'ftfy',
        'regex',
    ],
    extras_require={'dev': ['pytest>=8', 'hypothesis', 'ruff==0.17.6', 'pre-commit', 'wheel']},
)
